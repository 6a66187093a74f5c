/* The time of tasks outside the target, on CPUs which it may use, and their names. */
#ifndef DSAGENT_FOREIGN_H
#define DSAGENT_FOREIGN_H

#include "send.h"

#define NAME_AGE_NS 100000000ULL

/* comm of a process, kept for user space; read again ten times a second, for exec and prctl. */
static __noinline int remember_name(struct task_struct *leader, __u32 pid, __u64 now)
{
	struct ds_name *known = bpf_map_lookup_elem(&names, &pid);
	struct ds_name fresh = { .read_ns = now };

	if (known && now - known->read_ns < NAME_AGE_NS)
		return 0;
	bpf_probe_read_kernel(fresh.comm, sizeof(fresh.comm), leader->comm);
	bpf_map_update_elem(&names, &pid, &fresh, BPF_ANY);
	return 0;
}

static __always_inline void
send_foreigner(struct ds_cpu *cpu, struct ds_foreigner *f, __u64 step)
{
	struct ds_fact fact = {
		.kind = DS_FOREIGN, .exact = f->count == 1, .cpu = bpf_get_smp_processor_id(),
		.count = f->count, .pid = settings.target_pid, .culprit_pid = f->pid, .step = step,
		.start_ns = f->start_ns, .end_ns = f->end_ns, .ns = f->ns,
	};

	send(cpu, &fact);
	f->pid = 0;
}

__noinline int send_foreigners(struct ds_cpu *cpu, struct ds_foreign_sums *sums)
{
	if (!cpu || !sums)
		return 0;
	for (int n = 0; n < FOREIGNERS; n++)
		if (sums->by_pid[n].pid)
			send_foreigner(cpu, &sums->by_pid[n], sums->step);
	return 0;
}

/* A task outside the target ran on [start, now) on a CPU that the target may use. */
static __always_inline void
foreign(struct ds_cpu *cpu, struct task_struct *task, __u64 start, __u64 now, __u64 step)
{
	__u64 generation = *(volatile __u64 *)&shared.generation;
	struct ds_foreign_sums *sums = &cpu->sums[generation & 1];
	__u32 pid = task->tgid;
	struct ds_foreigner *f = &sums->by_pid[pid % FOREIGNERS];

	if (now - start >= settings.foreign_exact_ns) {
		struct ds_fact fact = {
			.kind = DS_FOREIGN, .exact = 1, .cpu = bpf_get_smp_processor_id(), .count = 1,
			.pid = settings.target_pid, .culprit_pid = pid, .culprit_tid = task->pid,
			.step = step, .start_ns = start, .end_ns = now, .ns = now - start,
		};

		remember_name(task->group_leader, pid, now);
		send(cpu, &fact);
		return;
	}
	if (sums->generation != generation) {
		for (int n = 0; n < FOREIGNERS; n++)
			sums->by_pid[n].pid = 0;
		sums->generation = generation;
		sums->step = step;
	} else if (sums->step != step) {
		send_foreigners(cpu, sums);
		sums->step = step;
	}
	if (f->pid != pid) {
		if (f->pid)
			send_foreigner(cpu, f, sums->step);
		remember_name(task->group_leader, pid, now);
		f->pid = pid;
		f->count = 0;
		f->ns = 0;
		f->start_ns = start;
	}
	f->ns += now - start;
	f->end_ns = now;
	f->count++;
}

#endif
