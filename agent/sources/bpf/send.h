/* The way to user space. A full ring takes nothing more, and that is counted. */
#ifndef DSAGENT_SEND_H
#define DSAGENT_SEND_H

#include "maps.h"

static __always_inline void send(struct ds_cpu *cpu, struct ds_fact *fact)
{
	if (bpf_ringbuf_output(&facts, fact, sizeof(*fact), BPF_RB_NO_WAKEUP))
		cpu->dropped++;
}

/* Something that user space shall tell as an event. */
static __always_inline void
send_note(struct ds_cpu *cpu, struct ds_thread *t, enum ds_kind kind)
{
	__u64 now = bpf_ktime_get_ns();
	struct ds_fact fact = { .kind = kind, .exact = 1, .cpu = -1, .start_ns = now, .end_ns = now };

	fact.pid = t->pid;
	fact.tid = t->tid;
	send(cpu, &fact);
}

#endif
