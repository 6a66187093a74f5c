/* A pid as the agent sees it: in its own namespace where it has one, else the initial one's. */
#ifndef DSAGENT_PIDS_H
#define DSAGENT_PIDS_H

/* 0: not in that namespace. */
static __noinline __u32 number_in(struct pid *pid, __u32 pid_namespace)
{
	__u32 level, found = 0;

	level = BPF_CORE_READ(pid, level);
	for (__u32 n = 0; n < 32 && n <= level; n++) {
		void *at = (void *)pid + bpf_core_field_offset(pid->numbers);
		struct upid upid = {};

		bpf_probe_read_kernel(&upid, sizeof(upid), at + n * sizeof(upid));
		if (!pid_namespace)
			return upid.nr;
		if (BPF_CORE_READ(upid.ns, ns.inum) == pid_namespace)
			found = upid.nr;
	}
	return found;
}

static __always_inline __u32 pid_in(struct task_struct *task, __u32 pid_namespace)
{
	if (!pid_namespace)
		return BPF_CORE_READ(task, pid);
	return number_in(BPF_CORE_READ(task, thread_pid), pid_namespace);
}

#endif
