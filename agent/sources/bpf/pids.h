/* A pid as the agent sees it: in its own namespace where it has one, else the initial one's. */
#ifndef DSAGENT_PIDS_H
#define DSAGENT_PIDS_H

/* 0: not in that namespace. */
static __noinline __u32 pid_in(struct task_struct *task, __u32 pid_namespace)
{
	struct pid *pid;
	__u32 level, found = 0;

	if (!pid_namespace)
		return BPF_CORE_READ(task, pid);
	pid = BPF_CORE_READ(task, thread_pid);
	level = BPF_CORE_READ(pid, level);
	for (__u32 n = 0; n < 32 && n <= level; n++) {
		void *at = (void *)pid + bpf_core_field_offset(pid->numbers);
		struct upid upid = {};

		bpf_probe_read_kernel(&upid, sizeof(upid), at + n * sizeof(upid));
		if (BPF_CORE_READ(upid.ns, ns.inum) == pid_namespace)
			found = upid.nr;
	}
	return found;
}

#endif
