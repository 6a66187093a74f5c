/* Why a task left the CPU, and whether it wakes others: read off the task itself, since looking at
 * every system call of the machine would cost far more. */
#ifndef DSAGENT_REASONS_H
#define DSAGENT_REASONS_H

#include "maps.h"

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

/* Since Linux 6.18. */
struct task_struct___throttled {
	bool throttled;
} __attribute__((preserve_access_index));

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
	return settings.has_prev_state ? ctx[3] : prev->__state;
}

static __always_inline bool is_fsync(__s64 nr)
{
	return nr == NR_FSYNC || nr == NR_FDATASYNC || nr == NR_MSYNC || nr == NR_SYNC ||
	       nr == NR_SYNCFS;
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
	/* A journal's commit is waited for without in_iowait; other uninterruptible waits are mostly
	 * for the memory map's lock. */
	if (state & STATE_UNINTERRUPTIBLE && is_fsync(nr))
		return DS_OFF_FSYNC;
	if (BPF_CORE_READ_BITFIELD(task, in_iowait))
		return DS_OFF_DISK;
	if (nr == NR_FUTEX || nr == NR_FUTEX_WAITV || nr == NR_FUTEX_WAIT)
		return DS_OFF_FUTEX;
	return DS_OFF_OTHER;
}

/* Whether a task is in a system call that wakes futexes; of those that end a thread only a
 * sibling's. (An interrupt that wakes may have come in between: a timer's is told by its time.) */
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

#endif
