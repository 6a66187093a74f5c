/* Where the time of the target's threads goes, told by the scheduler.
 *
 * A thread's slot (struct ds_thread) follows it from switch to switch. An interval
 * that ends is either sent alone through the ring buffer, if it is long, or
 * added to the thread's sums, which are sent when the step changes and read by
 * user space once a generation. Nothing here takes a lock: a slot is written by
 * the CPU that switches its thread, which the scheduler's own locks order, and
 * a CPU's record only by that CPU.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"

#define MAX_THREADS 4096
#define MAX_PROCESSES 1024
#define STATE_BITS 4
#define NAME_AGE_NS 1000000000ULL

#define STATE_UNINTERRUPTIBLE 0x2
#define STATE_STOPPED_OR_TRACED 0xc
#define STATE_DEAD 0x80
#define STATE_FROZEN 0x8000

#if defined(__TARGET_ARCH_x86)
#define SYSCALL_NUMBER(regs) ((__s64)(regs)->orig_ax)
#define SECOND_ARGUMENT(regs) ((regs)->si)
enum { NR_YIELD = 24, NR_FUTEX = 202, NR_EXIT = 60,
       NR_FSYNC = 74, NR_FDATASYNC = 75, NR_MSYNC = 26, NR_SYNC = 162, NR_SYNCFS = 306 };
#elif defined(__TARGET_ARCH_arm64)
#define SYSCALL_NUMBER(regs) ((__s64)(__s32)(regs)->syscallno)
#define SECOND_ARGUMENT(regs) ((regs)->regs[1])
enum { NR_YIELD = 124, NR_FUTEX = 98, NR_EXIT = 93,
       NR_FSYNC = 82, NR_FDATASYNC = 83, NR_MSYNC = 227, NR_SYNC = 81, NR_SYNCFS = 267 };
#else
#error "no system call numbers for this architecture"
#endif
enum { FUTEX_WAIT = 0, FUTEX_WAIT_BITSET = 9, FUTEX_PRIVATE = 128, FUTEX_REALTIME = 256 };
enum { NR_FUTEX_WAITV = 449, NR_FUTEX_WAKE = 454, NR_FUTEX_WAIT = 455, NR_FUTEX_REQUEUE = 456 };

/* Fields that came, went or were renamed. */
struct task_struct___before_5_14 {
	long state;
} __attribute__((preserve_access_index));
struct task_struct___throttled {
	bool throttled;
} __attribute__((preserve_access_index));

const volatile struct ds_config settings = {};
struct ds_control shared = {};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, __u32);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, MAX_THREADS);
	__type(key, __u32);
	__type(value, struct ds_thread);
} threads SEC(".maps");

/* The numbers of slots that were given back. */
struct {
	__uint(type, BPF_MAP_TYPE_STACK);
	__uint(max_entries, MAX_THREADS);
	__uint(value_size, sizeof(__u32));
} free_slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1); /* user space sets the number of CPUs */
	__type(key, __u32);
	__type(value, struct ds_cpu);
} cpus SEC(".maps");

/* The target's processes: pid in the initial namespace → its entry in words, 0: none. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PROCESSES);
	__type(key, __u32);
	__type(value, __u32);
} processes SEC(".maps");

/* What user space asks for, by pids as the agent sees them; values as in processes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PROCESSES);
	__type(key, __u32);
	__type(value, __u32);
} wanted SEC(".maps");

/* The running-step words; entry 0 stays empty. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, WORDS);
	__type(key, __u32);
	__type(value, struct ds_word);
} words SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, struct ds_name);
} names SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096); /* user space sets the size in bytes */
} facts SEC(".maps");

static __always_inline struct ds_cpu *this_cpu(void)
{
	__u32 id = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&cpus, &id);
}

static __always_inline struct ds_thread *thread_of(struct task_struct *task)
{
	__u32 *slot;

	if (!task->bpf_storage) /* most tasks: saves the call */
		return 0;
	slot = bpf_task_storage_get(&slots, task, 0, 0);
	return slot ? bpf_map_lookup_elem(&threads, slot) : 0;
}

static __always_inline void enter(struct ds_thread *t, enum ds_kind kind, __u64 now)
{
	*(volatile __u64 *)&t->since_state = now << STATE_BITS | kind;
}

static __always_inline void send(struct ds_cpu *cpu, struct ds_fact *fact)
{
	if (bpf_ringbuf_output(&facts, fact, sizeof(*fact), BPF_RB_NO_WAKEUP))
		cpu->dropped++;
}

static __noinline int send_sums(struct ds_cpu *cpu, struct ds_thread *t, struct ds_thread_sums *sums)
{
	if (!cpu || !t || !sums)
		return 0;
	for (int kind = DS_ONCPU; kind < THREAD_KINDS; kind++) {
		struct ds_sum *sum = &sums->kinds[kind];
		struct ds_fact fact = {
			.kind = kind, .exact = sum->count == 1, .cpu = -1, .count = sum->count,
			.pid = t->pid, .tid = t->tid, .step = sums->step,
			.start_ns = sum->start_ns, .end_ns = sum->end_ns, .ns = sum->ns,
		};

		if (sum->count)
			send(cpu, &fact);
		sum->count = 0;
	}
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
			sums->kinds[kind].count = 0;
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
	struct ds_sum *sum = &sums_of(cpu, t, step)->kinds[kind];

	if (!sum->count) {
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
static __noinline int blame(struct ds_cpu *cpu, struct ds_interval *i, __u64 *longest)
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

static __noinline int report(struct ds_cpu *cpu, struct ds_thread *t, struct ds_interval *i)
{
	if (!cpu || !t || !i || i->end <= i->start)
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

/* comm of a process, kept for user space; read again once a second, for exec and prctl. */
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

static __noinline int send_foreigners(struct ds_cpu *cpu, struct ds_foreign_sums *sums)
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

/* The step last seen in a thread's process, or in the target where it has no word of its own. */
static __always_inline __u64 last_step(struct ds_thread *t)
{
	struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);

	return word && word->address ? word->step : shared.step;
}

/* Read the step word from the memory at hand, that of the thread being switched out. */
static __always_inline __u64 read_step(struct ds_thread *t)
{
	struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);
	__u64 step;

	if (!word || !word->address)
		return shared.step;
	/* A page that is not there cannot be faulted in now: keep the step last seen. */
	if (!bpf_probe_read_user(&step, sizeof(step), (void *)word->address)) {
		word->step = step;
		shared.step = step;
	}
	return word->step;
}

static __always_inline __s64 syscall_of(struct task_struct *task)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);

	return SYSCALL_NUMBER(regs);
}

static __always_inline bool is_throttled(struct task_struct *task)
{
	struct task_struct___throttled *newer = (void *)task;

	if (settings.per_task_throttle && bpf_core_field_exists(newer->throttled))
		return newer->throttled;
	if (bpf_core_field_exists(task->se.cfs_rq) &&
	    bpf_core_field_exists(((struct cfs_rq *)0)->throttle_count))
		return BPF_CORE_READ(task, se.cfs_rq, throttle_count) > 0;
	return false;
}

static __always_inline __u32 state_of(__u64 *ctx, struct task_struct *prev)
{
	struct task_struct___before_5_14 *older = (void *)prev;

	if (settings.has_prev_state)
		return ctx[3];
	if (bpf_core_field_exists(prev->__state))
		return prev->__state;
	return BPF_CORE_READ(older, state);
}

/* Why a thread leaves the CPU. */
static __always_inline enum ds_kind why(struct task_struct *task, __u32 state, bool preempted)
{
	__s64 nr = syscall_of(task);

	if (preempted || !state) {
		if (is_throttled(task))
			return DS_THROTTLED;
		return nr == NR_YIELD && !preempted ? DS_YIELDED : DS_RUNQUEUE;
	}
	if (state & (STATE_STOPPED_OR_TRACED | STATE_FROZEN))
		return DS_STOPPED;
	if (bpf_core_field_exists(task->frozen) && BPF_CORE_READ_BITFIELD(task, frozen))
		return DS_STOPPED; /* the cgroup v2 freezer parks it in an ordinary sleep */
	if (BPF_CORE_READ_BITFIELD(task, in_iowait))
		return DS_OFF_DISK;
	if (nr == NR_FUTEX || nr == NR_FUTEX_WAITV || nr == NR_FUTEX_WAIT)
		return DS_OFF_FUTEX;
	/* Other uninterruptible waits are mostly for the memory map's lock; a journal's commit is
	 * waited for without in_iowait. */
	if (state & STATE_UNINTERRUPTIBLE && (nr == NR_FSYNC || nr == NR_FDATASYNC ||
	    nr == NR_MSYNC || nr == NR_SYNC || nr == NR_SYNCFS))
		return DS_OFF_DISK;
	return DS_OFF_OTHER;
}

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
	return kind >= DS_OFF_FUTEX && kind <= DS_STOPPED;
}

static __always_inline void leave(struct ds_cpu *cpu, struct ds_thread *t, struct task_struct *task,
				  __u32 state, bool preempted, __u64 step, __u64 now)
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
	} else if (kind != DS_UNKNOWN) {
		/* The kernel did not report that it was switched in, perhaps not even that it was
		 * woken (seen on a virtual machine after threads of its supervisor). It had not been
		 * woken when this CPU's last switch was reported: so much is still told. */
		cpu->missed++;
		if (is_off(kind))
			report_off(cpu, t, kind, since,
				   t->waking_ns > since ? t->waking_ns : cpu->run_start_ns, step);
	}
	t->cpu = bpf_get_smp_processor_id();
	if (state & STATE_DEAD && !preempted) {
		send_sums(cpu, t, sums_of(cpu, t, step));
		enter(t, DS_DEAD, now);
		give_back(t, task);
		return;
	}
	enter(t, why(task, state, preempted), now);
}

static __always_inline void arrive(struct ds_cpu *cpu, struct ds_thread *t, struct task_struct *task,
				   __u64 step, __u64 now)
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
	cpu->run_start_ns = now;
	cpu->foreign_pid = in ? 0 : next->tgid;
	cpu->running_tid = next->pid;
	if (in)
		arrive(cpu, in, next, last_step(in), now);
	if ((++cpu->switches & 63) == 0)
		cpu->cost_ns += (bpf_ktime_get_ns() - now) << 6;
	return 0;
}

/* Whether a task wakes a futex now. A timer's interrupt wakes too, and whoever it interrupted is
 * not to blame; so only those count that are in the short system calls that wake futexes. Where a
 * whole process exits, which may take long, nobody is left to be told. */
static __always_inline bool wakes_futexes(struct task_struct *task, bool sibling)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	__s64 nr = SYSCALL_NUMBER(regs);

	if (nr == NR_FUTEX) {
		__u32 operation = SECOND_ARGUMENT(regs) & ~(FUTEX_PRIVATE | FUTEX_REALTIME);

		return operation != FUTEX_WAIT && operation != FUTEX_WAIT_BITSET;
	}
	return nr == NR_FUTEX_WAKE || nr == NR_FUTEX_REQUEUE || (nr == NR_EXIT && sibling);
}

/* sched_waking runs where the waker runs, sched_wakeup perhaps elsewhere. */
SEC("tp_btf/sched_waking")
int on_waking(__u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0], *waker;
	struct ds_thread *t = thread_of(task), *sibling;
	struct ds_cpu *cpu = this_cpu();
	__u64 now;
	bool wakes;

	if (!t || !cpu)
		return 0;
	now = bpf_ktime_get_ns();
	waker = bpf_get_current_task_btf();
	sibling = thread_of(waker);
	wakes = wakes_futexes(waker, sibling && waker->tgid == task->tgid);
	t->waker_pid = !wakes ? 0 : sibling ? sibling->pid : waker->tgid;
	t->waker_tid = !wakes ? 0 : sibling ? sibling->tid : waker->pid;
	*(volatile __u64 *)&t->waking_ns = now;
	if ((++cpu->wakings & 63) == 0)
		cpu->cost_ns += (bpf_ktime_get_ns() - now) << 6;
	return 0;
}

/* A pid as the agent sees it: in its own namespace where it has one, else the initial one's. */
static __noinline __u32 seen_pid(struct task_struct *task, bool leader)
{
	struct pid *pid;
	__u32 level, found = 0;

	if (leader)
		task = task->group_leader;
	if (!settings.pid_namespace)
		return task->pid;
	pid = BPF_CORE_READ(task, thread_pid);
	level = BPF_CORE_READ(pid, level);
	for (__u32 n = 0; n < 32 && n <= level; n++) {
		void *at = (void *)pid + bpf_core_field_offset(pid->numbers);
		struct upid upid = {};

		bpf_probe_read_kernel(&upid, sizeof(upid), at + n * sizeof(upid));
		if (BPF_CORE_READ(upid.ns, ns.inum) == settings.pid_namespace)
			found = upid.nr;
	}
	return found;
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
	t->run_start_ns = now;
	t->waker_pid = 0;
	t->waker_tid = 0;
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
	if (pid != parent_pid) /* a ring is not inherited: it is mapped for its maker only */
		bpf_map_update_elem(&processes, &pid, &none, BPF_NOEXIST);
	track(child, pid == parent_pid ? *word : 0, DS_RUNQUEUE, bpf_ktime_get_ns());
	return 0;
}

/* The new image has no ring where the old one had it, and its thread may have a new tid. */
SEC("tp_btf/sched_process_exec")
int on_exec(__u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];
	struct ds_thread *t = thread_of(task);

	if (t) {
		struct ds_word *word = bpf_map_lookup_elem(&words, &t->word);

		if (word && word->address) {
			word->address = 0;
			shared.step = 0;
		}
		t->tid = seen_pid(task, false);
		bpf_probe_read_kernel(t->comm, sizeof(t->comm), task->comm);
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
	if (bpf_core_field_exists(task->__state)) {
		__u32 state = task->__state;

		if (state & STATE_DEAD || task->exit_state)
			return 0;
		if (state & (STATE_STOPPED_OR_TRACED | STATE_FROZEN))
			kind = DS_STOPPED;
	}
	track(task, word, kind, now);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
