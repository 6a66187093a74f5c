/* What sched.bpf.c shares with user space. layout.py holds the same
 * layouts as numpy types; the sizes are compared when the object is loaded. */
#ifndef DSAGENT_SCHED_H
#define DSAGENT_SCHED_H

/* What a thread of the target is doing or had to bear: agent/facts.py's Kind, three that make no
 * fact, and notes, which user space turns into events. */
enum ds_kind {
	DS_UNKNOWN = 0,
	DS_ONCPU = 1,
	DS_RUNQUEUE = 2,
	DS_THROTTLED = 3,
	DS_OFF_FUTEX = 4,
	DS_OFF_DISK = 5,
	DS_OFF_OTHER = 6,
	DS_STOPPED = 7,
	DS_FOREIGN = 8,
	DS_STEAL = 9,
	DS_IRQ = 10,
	DS_MAJOR_FAULT = 11,
	DS_MINOR_FAULT = 12,
	DS_RECLAIM = 13,
	DS_RETRANSMIT = 14,
	DS_BACKPRESSURE = 15,
	DS_BLOCK_IO = 16,
	DS_OFF_FSYNC = 17,
	DS_YIELDED = 30, /* runnable, but it gave the CPU away itself */
	DS_DEAD = 31,
	DS_NOTE_EXEC = 64, /* a process of the target runs another binary */
	DS_NOTE_OOM = 65, /* the kernel kills a process of the target to get its memory */
};

#define THREAD_KINDS 18 /* summed per thread; the indices 0 and DS_FOREIGN are unused */
#define RUNS 8 /* the last tasks that ran on a CPU */
#define WORDS 64 /* processes of a target that may have a running-step word, less one */
#define FOREIGNERS 16 /* foreign processes summed per CPU and step before one is sent early */

/* agent/facts.py's FACT_DTYPE, byte for byte. With the ring's own header a record is 64 bytes. */
struct ds_fact {
	__u8 kind;
	__u8 exact;
	__s16 cpu;
	__u32 count;
	__u32 pid;
	__u32 tid;
	__u32 culprit_pid;
	__u32 culprit_tid;
	__u64 step;
	__u64 start_ns;
	__u64 end_ns;
	__u64 ns;
};

/* Set before loading, constant afterwards: the verifier removes what they switch off. */
struct ds_config {
	__u64 exact_ns; /* intervals at least this long are sent alone */
	__u64 foreign_exact_ns; /* likewise for tasks outside the target */
	__u32 target_pid; /* as the agent sees it */
	__u32 pid_namespace; /* the agent's; 0: the initial one */
	__u8 has_prev_state; /* sched_switch has a fourth argument (Linux 5.18) */
	__u8 per_task_throttle; /* use task_struct.throttled where it exists */
	__u8 padding[6];
};

/* Read and written by both sides while running. */
struct ds_control {
	__u64 generation; /* user space adds one, then owns the sums of the one before */
	__u64 step; /* the step last seen running in the target */
	__u64 untracked; /* threads that found no slot, processes for which the table is full */
	__u64 slots_used; /* slots ever given out; may exceed what there are */
};

struct ds_sum {
	__u64 ns;
	__u64 start_ns; /* when the first interval ended or began, whichever bounds them all */
	__u64 end_ns;
	__u64 count;
};

struct ds_thread_sums {
	__u64 generation;
	__u64 step;
	__u64 used; /* bit `kind` is set where kinds[kind].count is not 0: most are, and stay cold */
	struct ds_sum kinds[THREAD_KINDS];
};

struct ds_thread {
	__u64 since_state; /* since_ns << 4 | kind: one word, so that it never tears */
	__u64 waking_ns; /* when it was last made runnable */
	__u64 run_start_ns; /* when it was last switched in */
	__u64 run_step; /* the step when it was last switched in or out */
	__u64 fault_ns; /* when the page fault that it handles began; 0: none, or nobody looked */
	__u64 file_fault_ns; /* when it last asked for a page of a file that was not mapped */
	__u64 disk_ns; /* when it last began to wait for a device */
	__u64 reclaim_ns; /* when it began to free memory; 0: it does not */
	__u32 waker_pid;
	__u32 waker_tid;
	__u32 pid; /* as the agent sees them */
	__u32 tid;
	__u32 word; /* its process's entry in words */
	__s32 cpu; /* where it last ran */
	__u8 comm[16];
	__u64 named; /* the generation in which comm was read */
	struct ds_thread_sums sums[2]; /* by generation, even and odd */
};

struct ds_run {
	__u64 start_ns;
	__u64 end_ns;
	__u32 pid;
	__u32 tid;
};

struct ds_foreigner {
	__u32 pid; /* 0: free */
	__u32 count;
	__u64 ns;
	__u64 start_ns;
	__u64 end_ns;
};

struct ds_foreign_sums {
	__u64 generation;
	__u64 step;
	struct ds_foreigner by_pid[FOREIGNERS];
};

struct ds_cpu {
	__u64 watched; /* set by user space: the target may run here */
	__u64 run_start_ns; /* of the task now running */
	__u32 foreign_pid; /* of the task now running; 0: idle or the target's own */
	__u32 running_tid; /* of whatever runs now */
	__u64 switches;
	__u64 wakings;
	__u64 others; /* runs of the programs beside those two */
	__u64 glances; /* runs that looked and left, but those of on_waking */
	__u64 timer_ns; /* when a timer last expired here */
	__u64 irq_start_ns; /* of the interrupt on top of a thread of the target */
	__u32 irq; /* enum ds_irq */
	__u32 steal_seen; /* whether steal_ns is known */
	__u64 steal_ns; /* of this CPU, as last read */
	__u64 cost_ns; /* estimated from one run in 64 */
	__u64 dropped; /* facts for which the ring had no room */
	__u64 missed; /* switches of the target's threads that the kernel did not report */
	__u64 head; /* runs[head % RUNS] is written next */
	struct ds_run runs[RUNS];
	struct ds_foreign_sums sums[2];
};

struct ds_word {
	__u64 address; /* of a process's running-step word, in its memory; 0: none */
	__u64 step; /* last seen there */
};

struct ds_name {
	__u64 read_ns;
	__u8 comm[16];
};

#endif
