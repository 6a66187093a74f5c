/* The maps, and the way from a CPU or a task to its record. sched.bpf.o makes them; the other
 * objects are given the same ones when they are loaded. */
#ifndef DSAGENT_MAPS_H
#define DSAGENT_MAPS_H

#define MAX_THREADS 4096
#define MAX_PROCESSES 1024

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

/* No run takes longer by itself. A hypervisor that takes the CPU away meanwhile, for milliseconds,
 * would count 64 times. */
#define LONGEST_RUN_NS 20000

/* One run in 64, which began at `began`, stands for all. */
static __always_inline void time_run(struct ds_cpu *cpu, __u64 began)
{
	__u64 took = bpf_ktime_get_ns() - began;

	cpu->cost_ns += (took < LONGEST_RUN_NS ? took : LONGEST_RUN_NS) << 6;
}

/* A program beside on_switch and on_waking ends, which began at `began`. */
static __always_inline void count_run(struct ds_cpu *cpu, __u64 began)
{
	if ((++cpu->others & 63) == 0)
		time_run(cpu, began);
}

/* A program looked, and has nothing or next to nothing to do. */
static __always_inline int glanced(struct ds_cpu *cpu)
{
	if (cpu)
		cpu->glances++;
	return 0;
}

static __always_inline struct ds_thread *thread_of(struct task_struct *task)
{
	__u32 *slot;

	if (!task->bpf_storage) /* most tasks: saves the call */
		return 0;
	slot = bpf_task_storage_get(&slots, task, 0, 0);
	return slot ? bpf_map_lookup_elem(&threads, slot) : 0;
}

#endif
