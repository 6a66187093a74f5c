/* What a thread waits for to get memory: page faults, direct reclaim; and who is killed for it. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "maps.h"
#include "steps.h"
#include "sums.h"

#define SUBMIT_NS 1000000 /* a fault that waits for the device begins to within this time */
#define RETRY_NS 50000 /* a fault that has waited asks for its page again within this time */

static __always_inline void
tell(struct ds_cpu *cpu, struct ds_thread *t, enum ds_kind kind, __u64 start, __u64 now)
{
	struct ds_interval i = { kind, 0, 0, start, now, read_step(t) };

	report(cpu, t, &i);
	count_run(cpu, now);
}

/* Tier full: all page faults of the machine come by here, twice. */

static __always_inline int begin_fault(void)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());

	if (t)
		t->fault_ns = bpf_ktime_get_ns();
	return glanced(this_cpu());
}

SEC("tp_btf/page_fault_user")
int on_fault_user(__u64 *ctx)
{
	return begin_fault();
}

/* In a system call that reads or writes the thread's memory. */
SEC("tp_btf/page_fault_kernel")
int on_fault_kernel(__u64 *ctx)
{
	return begin_fault();
}

/* This software event and the next fire when the fault has been handled, and say how. */
SEC("perf_event")
int on_fault_minor(struct bpf_perf_event_data *ctx)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_cpu *cpu = this_cpu();
	__u64 start;

	if (!t || !cpu || !t->fault_ns)
		return glanced(cpu);
	start = t->fault_ns;
	t->fault_ns = 0;
	tell(cpu, t, DS_MINOR_FAULT, start, bpf_ktime_get_ns());
	return 0;
}

/* Without looking at every fault: those that find no page of their file in the map come by here
 * first, and again when they have waited for the device. */
SEC("tp_btf/mm_filemap_fault")
int on_file_fault(__u64 *ctx)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	__u64 now;

	if (t) {
		now = bpf_ktime_get_ns();
		if (t->disk_ns <= t->file_fault_ns || now - t->run_start_ns > RETRY_NS)
			t->file_fault_ns = now;
	}
	return glanced(this_cpu());
}

/* When a major fault that ends `now` began, as far as that is known: at the latest when it began to
 * wait for the device; `now` where it did not even do that. */
static __always_inline __u64 when_begun(struct ds_thread *t, __u64 now)
{
	__u64 start = now;

	if (t->fault_ns)
		start = t->fault_ns;
	else if (t->disk_ns > t->file_fault_ns && now - t->run_start_ns < SUBMIT_NS)
		start = t->disk_ns - t->file_fault_ns < SUBMIT_NS ? t->file_fault_ns : t->disk_ns;
	else if (now - t->file_fault_ns < SUBMIT_NS)
		start = t->file_fault_ns;
	t->fault_ns = 0;
	t->file_fault_ns = 0;
	t->disk_ns = 0;
	return start;
}

SEC("perf_event")
int on_fault_major(struct bpf_perf_event_data *ctx)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_cpu *cpu = this_cpu();
	__u64 now;

	if (!t || !cpu)
		return glanced(cpu);
	now = bpf_ktime_get_ns();
	tell(cpu, t, DS_MAJOR_FAULT, when_begun(t, now), now);
	return 0;
}

static __always_inline int begin_reclaim(void)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());

	if (t)
		t->reclaim_ns = bpf_ktime_get_ns();
	return glanced(this_cpu());
}

static __always_inline int end_reclaim(void)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_cpu *cpu = this_cpu();
	__u64 start;

	if (!t || !cpu || !t->reclaim_ns)
		return glanced(cpu);
	start = t->reclaim_ns;
	t->reclaim_ns = 0;
	tell(cpu, t, DS_RECLAIM, start, bpf_ktime_get_ns());
	return 0;
}

SEC("tp_btf/mm_vmscan_direct_reclaim_begin")
int on_reclaim_begin(__u64 *ctx)
{
	return begin_reclaim();
}

SEC("tp_btf/mm_vmscan_direct_reclaim_end")
int on_reclaim_end(__u64 *ctx)
{
	return end_reclaim();
}

/* The same within the limit of a cgroup. */
SEC("tp_btf/mm_vmscan_memcg_reclaim_begin")
int on_group_reclaim_begin(__u64 *ctx)
{
	return begin_reclaim();
}

SEC("tp_btf/mm_vmscan_memcg_reclaim_end")
int on_group_reclaim_end(__u64 *ctx)
{
	return end_reclaim();
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
