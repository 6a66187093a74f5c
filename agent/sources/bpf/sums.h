/* How an interval leaves: alone through the ring buffer if it is long, else added to a sum, which
 * is sent when the step changes and read by user space once a generation.
 *
 * Functions that are not static are verified once, and not again wherever they are called: that
 * takes two thirds off the time to load. */
#ifndef DSAGENT_SUMS_H
#define DSAGENT_SUMS_H

#include "send.h"

#define STATE_BITS 5

static __always_inline void enter(struct ds_thread *t, enum ds_kind kind, __u64 now)
{
	*(volatile __u64 *)&t->since_state = now << STATE_BITS | kind;
}

__noinline int
send_sums(struct ds_cpu *cpu, struct ds_thread *t, struct ds_thread_sums *sums)
{
	if (!cpu || !t || !sums)
		return 0;
	for (int kind = DS_ONCPU; kind < THREAD_KINDS; kind++) {
		struct ds_sum *sum = &sums->kinds[kind];
		struct ds_fact fact = {};

		if (!(sums->used >> kind & 1))
			continue;
		fact.kind = kind;
		fact.exact = sum->count == 1;
		fact.cpu = -1;
		fact.count = sum->count;
		fact.pid = t->pid;
		fact.tid = t->tid;
		fact.step = sums->step;
		fact.start_ns = sum->start_ns;
		fact.end_ns = sum->end_ns;
		fact.ns = sum->ns;
		send(cpu, &fact);
		sum->count = 0;
	}
	sums->used = 0;
	return 0;
}

/* The sums to add to now: this generation's, of this step. */
static __always_inline struct ds_thread_sums *
sums_of(struct ds_cpu *cpu, struct ds_thread *t, __u64 step)
{
	__u64 generation = *(volatile __u64 *)&shared.generation;
	struct ds_thread_sums *sums = &t->sums[generation & 1];

	if (sums->generation != generation) { /* user space has read what was in it */
		for (int kind = 0; kind < THREAD_KINDS; kind++)
			if (sums->used >> kind & 1)
				sums->kinds[kind].count = 0;
		sums->used = 0;
		sums->generation = generation;
		sums->step = step;
	} else if (sums->step != step) {
		send_sums(cpu, t, sums);
		sums->step = step;
	}
	return sums;
}

static __always_inline void
add(struct ds_cpu *cpu, struct ds_thread *t, enum ds_kind kind, __u64 start, __u64 end, __u64 step)
{
	struct ds_thread_sums *sums = sums_of(cpu, t, step);
	struct ds_sum *sum = &sums->kinds[kind];

	if (!sum->count) {
		sums->used |= 1ULL << kind;
		sum->ns = 0;
		sum->start_ns = start;
	}
	sum->ns += end - start;
	sum->end_ns = end;
	sum->count++;
}

struct ds_interval {
	enum ds_kind kind;
	__u32 culprit_pid;
	__u32 culprit_tid;
	__u64 start;
	__u64 end;
	__u64 step;
};

static __always_inline void
send_interval(struct ds_cpu *cpu, struct ds_thread *t, const struct ds_interval *i)
{
	struct ds_fact fact = {
		.kind = i->kind, .exact = 1, .cpu = bpf_get_smp_processor_id(), .count = 1,
		.pid = t->pid, .tid = t->tid,
		.culprit_pid = i->culprit_pid, .culprit_tid = i->culprit_tid,
		.step = i->step, .start_ns = i->start, .end_ns = i->end, .ns = i->end - i->start,
	};

	send(cpu, &fact);
}

/* Who ran longest on a CPU within an interval, of the last RUNS tasks there. */
__noinline int blame(struct ds_cpu *cpu, struct ds_interval *i, __u64 *longest)
{
	if (!cpu || !i || !longest)
		return 0;
	for (int n = 0; n < RUNS; n++) {
		struct ds_run *run = &cpu->runs[n];
		__u64 start = run->start_ns > i->start ? run->start_ns : i->start;
		__u64 end = run->end_ns < i->end ? run->end_ns : i->end;

		if (end > start && end - start > *longest) {
			*longest = end - start;
			i->culprit_pid = run->pid;
			i->culprit_tid = run->tid;
		}
	}
	return 0;
}

__noinline int report(struct ds_cpu *cpu, struct ds_thread *t, struct ds_interval *i)
{
	if (!cpu || !t || !i || i->end < i->start)
		return 0;
	/* A fault whose beginning is not known counts all the same. */
	if (i->end == i->start && i->kind != DS_MAJOR_FAULT)
		return 0;
	if (i->end - i->start < settings.exact_ns) {
		__u32 kind = i->kind;

		if (kind < THREAD_KINDS)
			add(cpu, t, kind, i->start, i->end, i->step);
		return 0;
	}
	if (i->kind == DS_RUNQUEUE) {
		__u32 there = t->cpu;
		__u64 longest = 0;

		blame(cpu, i, &longest);
		if (there != bpf_get_smp_processor_id())
			blame(bpf_map_lookup_elem(&cpus, &there), i, &longest);
	}
	send_interval(cpu, t, i);
	return 0;
}

#endif
