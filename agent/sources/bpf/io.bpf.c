/* Requests to block devices that threads of the target made. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "maps.h"
#include "steps.h"
#include "send.h"

struct pending {
	__u64 start_ns;
	__u64 step;
	__u32 pid;
	__u32 tid;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct pending);
} requests SEC(".maps");

static __always_inline int begin(__u64 request)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_cpu *cpu = this_cpu();
	struct pending p = {};

	if (!t || !cpu)
		return 0;
	p.start_ns = bpf_ktime_get_ns();
	p.step = read_step(t);
	p.pid = t->pid;
	p.tid = t->tid;
	if (bpf_map_update_elem(&requests, &request, &p, BPF_ANY))
		cpu->dropped++;
	count_run(cpu, p.start_ns);
	return 0;
}

static __always_inline int end(__u64 request)
{
	struct pending *p = bpf_map_lookup_elem(&requests, &request);
	struct ds_cpu *cpu = this_cpu();
	struct ds_fact fact = { .kind = DS_BLOCK_IO, .exact = 1, .cpu = -1, .count = 1 };

	if (!p || !cpu)
		return 0;
	fact.pid = p->pid;
	fact.tid = p->tid;
	fact.step = p->step;
	fact.start_ns = p->start_ns;
	fact.end_ns = bpf_ktime_get_ns();
	fact.ns = fact.end_ns - fact.start_ns;
	bpf_map_delete_elem(&requests, &request);
	send(cpu, &fact);
	count_run(cpu, fact.end_ns);
	return 0;
}

SEC("tp_btf/block_io_start")
int on_block_start(__u64 *ctx)
{
	return begin(ctx[0]);
}

SEC("tp_btf/block_io_done")
int on_block_done(__u64 *ctx)
{
	return end(ctx[0]);
}

/* Where the kernel has not those two: some requests are issued by a worker, whose they are not. */
SEC("tp_btf/block_rq_issue")
int on_block_issue(__u64 *ctx)
{
	return begin(ctx[0]);
}

SEC("tp_btf/block_rq_complete")
int on_block_complete(__u64 *ctx)
{
	return end(ctx[0]);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
