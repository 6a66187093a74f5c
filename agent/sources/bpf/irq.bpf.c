/* What is taken from a running thread without a switch: interrupts on top of it, and time that the
 * hypervisor gave to others. Only CPUs on which a thread of the target runs are looked at. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "maps.h"
#include "steps.h"
#include "sums.h"

/* Soft ones are interrupted by hard ones, whose time is theirs too; hard ones by none. */
enum ds_irq { NO_IRQ = 0, HARD_IRQ = 1, SOFT_IRQ = 2 };

static __always_inline int begin(enum ds_irq irq)
{
	struct ds_cpu *cpu = this_cpu();

	if (cpu && thread_of(bpf_get_current_task_btf()) &&
	    !(irq == HARD_IRQ && cpu->irq == SOFT_IRQ)) {
		cpu->irq = irq;
		cpu->irq_start_ns = bpf_ktime_get_ns();
	}
	return glanced(cpu);
}

static __always_inline int end(enum ds_irq irq)
{
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct ds_interval i = { DS_IRQ };
	struct ds_cpu *cpu = this_cpu();

	if (!t || !cpu || cpu->irq != irq)
		return glanced(cpu);
	cpu->irq = NO_IRQ;
	i.start = cpu->irq_start_ns;
	i.end = bpf_ktime_get_ns();
	i.step = read_step(t);
	/* What began before this thread ran was on top of another, and its end was not seen. */
	if (i.start >= t->run_start_ns)
		report(cpu, t, &i);
	count_run(cpu, i.end);
	return 0;
}

SEC("tp_btf/irq_handler_entry")
int on_irq_entry(__u64 *ctx)
{
	return begin(HARD_IRQ);
}

SEC("tp_btf/irq_handler_exit")
int on_irq_exit(__u64 *ctx)
{
	return end(HARD_IRQ);
}

/* The local timer's interrupt has no handler of that kind on x86. */
SEC("tp_btf/local_timer_entry")
int on_timer_entry(__u64 *ctx)
{
	return begin(HARD_IRQ);
}

SEC("tp_btf/local_timer_exit")
int on_timer_exit(__u64 *ctx)
{
	return end(HARD_IRQ);
}

SEC("tp_btf/softirq_entry")
int on_softirq_entry(__u64 *ctx)
{
	return begin(SOFT_IRQ);
}

SEC("tp_btf/softirq_exit")
int on_softirq_exit(__u64 *ctx)
{
	return end(SOFT_IRQ);
}

/* The kernel books stolen time when a tick is handled. A tick that comes late because of it comes
 * as soon as the CPU is given back: so it is taken to lie just before. */
SEC("tp_btf/hrtimer_expire_exit")
int on_tick_end(__u64 *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct ds_interval i = { DS_STEAL };
	struct ds_cpu *cpu = this_cpu();
	__u64 steal = 0, before;
	struct ds_thread *t;

	if (!cpu)
		return 0;
	/* What the run queue has booked of it so far. */
	if (bpf_core_field_exists(((struct rq *)0)->prev_steal_time) &&
	    bpf_core_field_exists(task->se.cfs_rq))
		steal = BPF_CORE_READ(task, se.cfs_rq, rq, prev_steal_time);
	before = cpu->steal_ns;
	if (steal == before && cpu->steal_seen)
		return glanced(cpu);
	cpu->steal_ns = steal;
	t = thread_of(task);
	if (t && cpu->steal_seen) {
		i.end = bpf_ktime_get_ns();
		i.start = i.end - (steal - before);
		i.step = read_step(t);
		report(cpu, t, &i);
		count_run(cpu, i.end);
	}
	cpu->steal_seen = 1;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
