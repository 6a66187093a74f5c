/* Where the time of the target's threads goes, told by the scheduler.
 *
 * A thread's slot (struct ds_thread) follows it from switch to switch. Nothing here takes a lock: a
 * slot is written by the CPU that switches its thread, which the scheduler's own locks order, and a
 * CPU's record only by that CPU.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "pids.h"
#include "maps.h"
#include "steps.h"
#include "sums.h"
#include "foreign.h"
#include "reasons.h"

#define TABLE_FULL 7 /* E2BIG */
#define TIMER_NS 5000 /* a timer that wakes somebody does so within this time */

static __always_inline void give_back(struct ds_thread *t, struct task_struct *task)
{
	__u32 *slot = bpf_task_storage_get(&slots, task, 0, 0);
	__u32 pid = task->tgid;

	if (slot)
		bpf_map_push_elem(&free_slots, slot, 0);
	if (task->signal->live.counter == 0)
		bpf_map_delete_elem(&processes, &pid);
}

/* When a thread that blocked at `since` and runs again `now` was made runnable. The waking may
 * overtake the switch, so that it is older; where none has come since the thread began to run,
 * the kernel did not report it, and the rest of the wait is no evidence that anybody kept it from
 * running. */
static __always_inline __u64 when_woken(struct ds_thread *t, __u64 since, __u64 now)
{
	if (t->waking_ns > since)
		return t->waking_ns;
	return t->waking_ns >= t->run_start_ns ? since : now;
}

static __always_inline void report_off(struct ds_cpu *cpu, struct ds_thread *t, enum ds_kind kind,
				       __u64 since, __u64 woken, __u64 step)
{
	struct ds_interval off = { kind, 0, 0, since, woken, step };

	if (kind == DS_OFF_FUTEX && t->waking_ns > since) {
		off.culprit_pid = t->waker_pid;
		off.culprit_tid = t->waker_tid;
	}
	report(cpu, t, &off);
}

static __always_inline bool is_off(enum ds_kind kind)
{
	return (kind >= DS_OFF_FUTEX && kind <= DS_STOPPED) || kind == DS_OFF_FSYNC;
}

/* A thread runs, and the kernel did not report that it was switched in, perhaps not even that it
 * was woken. It had not been woken when this CPU's last switch was reported: so much is told. */
static __always_inline void missed(struct ds_cpu *cpu, struct ds_thread *t)
{
	enum ds_kind kind = t->since_state & ((1 << STATE_BITS) - 1);
	__u64 since = t->since_state >> STATE_BITS;

	if (kind != DS_UNKNOWN)
		cpu->missed++;
	if (is_off(kind))
		report_off(cpu, t, kind, since,
			   t->waking_ns > since ? t->waking_ns : cpu->run_start_ns, t->run_step);
}

static __always_inline void
leave(struct ds_cpu *cpu, struct ds_thread *t, struct task_struct *task, __u32 state,
      bool preempted, __u64 step, __u64 now)
{
	enum ds_kind kind = t->since_state & ((1 << STATE_BITS) - 1);
	__u64 since = t->since_state >> STATE_BITS;

	if (kind == DS_ONCPU) {
		/* A run through a change of step is sent alone, so that it can be split by time. */
		if (t->run_step != step && now - since >= settings.exact_ns) {
			struct ds_interval i = { DS_ONCPU, 0, 0, since, now, step };

			send_interval(cpu, t, &i);
		} else {
			add(cpu, t, DS_ONCPU, since, now, step);
		}
	} else {
		missed(cpu, t);
	}
	t->run_step = step;
	t->cpu = bpf_get_smp_processor_id();
	/* A thread takes its name after it has begun, and one that ends can be asked no more. */
	if (t->named != shared.generation || state & STATE_DEAD) {
		t->named = shared.generation;
		bpf_probe_read_kernel(t->comm, sizeof(t->comm), task->comm);
	}
	if (state & STATE_DEAD && !preempted) {
		send_sums(cpu, t, sums_of(cpu, t, step));
		enter(t, DS_DEAD, now);
		give_back(t, task);
		return;
	}
	kind = why(task, state, preempted);
	if (kind == DS_OFF_DISK)
		t->disk_ns = now;
	enter(t, kind, now);
}

static __always_inline void arrive(struct ds_cpu *cpu, struct ds_thread *t, __u64 step, __u64 now)
{
	enum ds_kind kind = t->since_state & ((1 << STATE_BITS) - 1);
	__u64 since = t->since_state >> STATE_BITS;
	struct ds_interval i = { DS_RUNQUEUE, 0, 0, since, now, step };

	if (is_off(kind)) {
		i.start = when_woken(t, since, now);
		report_off(cpu, t, kind, since, i.start, step);
		report(cpu, t, &i);
	} else if (kind == DS_RUNQUEUE || kind == DS_THROTTLED) {
		i.kind = kind;
		report(cpu, t, &i);
	}
	t->run_step = step;
	t->run_start_ns = now;
	enter(t, DS_ONCPU, now);
}

static __always_inline void
occupy(struct ds_cpu *cpu, struct task_struct *task, struct ds_thread *t, __u64 now)
{
	cpu->run_start_ns = now;
	cpu->foreign_pid = t ? 0 : task->tgid;
	cpu->running_tid = task->pid;
}

SEC("tp_btf/sched_switch")
int on_switch(__u64 *ctx)
{
	bool preempted = ctx[0];
	struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
	__u64 now = bpf_ktime_get_ns();
	struct ds_cpu *cpu = this_cpu();
	struct ds_thread *out, *in;
	__u64 step, start;

	if (!cpu)
		return 0;
	out = thread_of(prev);
	in = thread_of(next);
	step = out ? read_step(out) : shared.step;
	/* Where somebody else was seen to begin here, a switch has been missed. */
	start = cpu->running_tid == prev->pid ? cpu->run_start_ns : 0;
	if (cpu->watched && prev->pid && start) {
		struct ds_run *run = &cpu->runs[cpu->head % RUNS];

		run->start_ns = start;
		run->end_ns = now;
		run->pid = out ? out->pid : prev->tgid;
		run->tid = out ? out->tid : prev->pid;
		cpu->head++;
		if (!out)
			foreign(cpu, prev, start, now, step);
	}
	if (out)
		leave(cpu, out, prev, state_of(ctx, prev), preempted, step, now);
	occupy(cpu, next, in, now);
	if (in)
		arrive(cpu, in, last_step(in), now);
	if ((++cpu->switches & 63) == 0)
		time_run(cpu, now);
	return 0;
}

/* Who wakes a thread that waits in futex; a timer, which has just expired, is nobody. */
static __always_inline void
remember_waker(struct ds_thread *t, struct task_struct *task, bool timer)
{
	struct task_struct *waker = bpf_get_current_task_btf();
	struct ds_thread *sibling = thread_of(waker);
	bool wakes = !timer && wakes_futexes(waker, sibling && waker->tgid == task->tgid);

	t->waker_pid = !wakes ? 0 : sibling ? sibling->pid : waker->tgid;
	t->waker_tid = !wakes ? 0 : sibling ? sibling->tid : waker->pid;
}

/* sched_waking runs where the waker runs, sched_wakeup perhaps elsewhere. */
SEC("tp_btf/sched_waking")
int on_waking(__u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];
	struct ds_thread *t = thread_of(task);
	struct ds_cpu *cpu;
	enum ds_kind kind;
	__u64 now;

	if (!t) /* not even counted: an unrelated process pays for nothing else but this */
		return 0;
	cpu = this_cpu();
	if (!cpu)
		return 0;
	now = bpf_ktime_get_ns();
	kind = t->since_state & ((1 << STATE_BITS) - 1);
	/* It may not have been switched out yet. */
	if (kind == DS_OFF_FUTEX || kind == DS_ONCPU || kind == DS_UNKNOWN)
		remember_waker(t, task, now - cpu->timer_ns <= TIMER_NS);
	*(volatile __u64 *)&t->waking_ns = now;
	if ((++cpu->wakings & 63) == 0)
		time_run(cpu, now);
	return 0;
}

/* A timer expires. Switches say what runs; here, at each tick, it is checked. So whatever ran when
 * the programs were attached becomes known, and what follows a switch that the kernel did not
 * report (seen on a virtual machine after threads of its supervisor). */
SEC("tp_btf/hrtimer_expire_entry")
int on_tick(__u64 *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct ds_cpu *cpu = this_cpu();
	struct ds_thread *t;
	__u64 now;

	if (!cpu)
		return 0;
	now = bpf_ktime_get_ns();
	cpu->timer_ns = now;
	if (cpu->running_tid == task->pid)
		return glanced(cpu);
	t = thread_of(task);
	if (t) {
		missed(cpu, t);
		t->run_start_ns = now;
		enter(t, DS_ONCPU, now);
	}
	occupy(cpu, task, t, now);
	return 0;
}

static __always_inline __u32 seen_pid(struct task_struct *task, bool leader)
{
	return pid_in(leader ? task->group_leader : task, settings.pid_namespace);
}

/* Give a task of the target a slot, unless it has one. */
static __always_inline void
track(struct task_struct *task, __u32 word, enum ds_kind kind, __u64 now)
{
	struct ds_thread *t = thread_of(task);
	__u32 free;

	if (t) {
		t->word = word;
		return;
	}
	if (bpf_map_pop_elem(&free_slots, &free)) {
		free = MAX_THREADS;
		if (shared.slots_used < MAX_THREADS)
			free = __sync_fetch_and_add(&shared.slots_used, 1);
	}
	t = bpf_map_lookup_elem(&threads, &free);
	if (!t) {
		__sync_fetch_and_add(&shared.untracked, 1);
		return;
	}
	t->pid = seen_pid(task, true);
	t->tid = seen_pid(task, false);
	t->word = word;
	t->cpu = -1;
	t->waking_ns = 0;
	t->fault_ns = 0;
	t->file_fault_ns = 0;
	t->disk_ns = 0;
	t->reclaim_ns = 0;
	t->run_start_ns = now;
	t->waker_pid = 0;
	t->waker_tid = 0;
	t->named = shared.generation;
	bpf_probe_read_kernel(t->comm, sizeof(t->comm), task->comm);
	enter(t, kind, now);
	if (!bpf_task_storage_get(&slots, task, &free, BPF_LOCAL_STORAGE_GET_F_CREATE)) {
		bpf_map_push_elem(&free_slots, &free, 0);
		enter(t, DS_DEAD, now);
		__sync_fetch_and_add(&shared.untracked, 1);
	}
}

SEC("tp_btf/sched_process_fork")
int on_fork(__u64 *ctx)
{
	struct task_struct *parent = (void *)ctx[0], *child = (void *)ctx[1];
	__u32 parent_pid = parent->tgid, pid = child->tgid, none = 0;
	__u32 *word = bpf_map_lookup_elem(&processes, &parent_pid);

	if (!word)
		return 0;
	/* A ring is not inherited: it is mapped for its maker only. */
	if (pid != parent_pid &&
	    bpf_map_update_elem(&processes, &pid, &none, BPF_NOEXIST) == -TABLE_FULL)
		__sync_fetch_and_add(&shared.untracked, 1);
	track(child, pid == parent_pid ? *word : 0, DS_RUNQUEUE, bpf_ktime_get_ns());
	return 0;
}

/* The new image has no ring where the old one had it, and its thread may have a new tid. */
SEC("tp_btf/sched_process_exec")
int on_exec(__u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];
	struct ds_thread *t = thread_of(task);
	struct ds_cpu *cpu = this_cpu();

	if (t) {
		struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);

		if (word && word->address) {
			word->address = 0;
			shared.step = 0;
		}
		t->tid = seen_pid(task, false);
		bpf_probe_read_kernel(t->comm, sizeof(t->comm), task->comm);
		if (cpu)
			send_note(cpu, t, DS_NOTE_EXEC);
	}
	return 0;
}

/* Run by user space after attaching, and when it has learnt of more step words: finds the
 * threads that exist already. */
SEC("iter/task")
int scan(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u64 now = bpf_ktime_get_ns();
	enum ds_kind kind = DS_UNKNOWN;
	__u32 pid, seen, parent, word = 0;
	__u32 *known, *asked;

	if (!task)
		return 0;
	pid = task->tgid;
	seen = seen_pid(task, true);
	parent = task->real_parent->tgid;
	asked = bpf_map_lookup_elem(&wanted, &seen);
	if (asked) {
		word = *asked;
	} else {
		known = bpf_map_lookup_elem(&processes, &pid);
		if (known)
			word = *known;
		else if (!bpf_map_lookup_elem(&processes, &parent))
			return 0; /* nor was it forked by one of them before we were attached */
	}
	bpf_map_update_elem(&processes, &pid, &word, BPF_ANY);
	if (task->__state & STATE_DEAD || task->exit_state)
		return 0;
	if (task->__state & (STATE_STOPPED_OR_TRACED | STATE_FROZEN))
		kind = DS_STOPPED;
	track(task, word, kind, now);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
