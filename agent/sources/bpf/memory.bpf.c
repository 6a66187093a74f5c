/* What a thread waits for to get memory: page faults, direct reclaim; and who is killed for it. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "maps.h"
#include "steps.h"
#include "sums.h"

static __always_inline int begin(bool fault)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());

	if (t && fault)
		t->fault_ns = bpf_ktime_get_ns();
	else if (t)
		t->reclaim_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int end(enum ds_kind kind, bool fault)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_cpu *cpu = this_cpu();
	struct ds_interval i = { kind };

	if (!t || !cpu)
		return 0;
	i.start = fault ? t->fault_ns : t->reclaim_ns;
	if (!i.start)
		return 0;
	if (fault)
		t->fault_ns = 0;
	else
		t->reclaim_ns = 0;
	i.end = bpf_ktime_get_ns();
	i.step = read_step(t);
	report(cpu, t, &i);
	count_run(cpu, i.end);
	return 0;
}

SEC("tp_btf/page_fault_user")
int on_fault_user(__u64 *ctx)
{
	return begin(true);
}

/* In a system call that reads or writes the thread's memory. */
SEC("tp_btf/page_fault_kernel")
int on_fault_kernel(__u64 *ctx)
{
	return begin(true);
}

/* The two software events fire when the fault has been handled, and say how. */
SEC("perf_event")
int on_fault_major(struct bpf_perf_event_data *ctx)
{
	return end(DS_MAJOR_FAULT, true);
}

SEC("perf_event")
int on_fault_minor(struct bpf_perf_event_data *ctx)
{
	return end(DS_MINOR_FAULT, true);
}

SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int on_reclaim_begin(__u64 *ctx)
{
	return begin(false);
}

SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int on_reclaim_end(__u64 *ctx)
{
	return end(DS_RECLAIM, false);
}

/* The same within the limit of a cgroup. */
SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int on_group_reclaim_begin(__u64 *ctx)
{
	return begin(false);
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int on_group_reclaim_end(__u64 *ctx)
{
	return end(DS_RECLAIM, false);
}

SEC("tp_btf/mark_victim")
int on_oom(__u64 *ctx)
{
	struct ds_thread *t = thread_of((struct task_struct *)ctx[0]);
	struct ds_cpu *cpu = this_cpu();

	if (t && cpu)
		send_note(cpu, t, DS_NOTE_OOM);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
