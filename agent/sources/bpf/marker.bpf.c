/* A function of the target that is entered once a step: each call is numbered and told. The number
 * is put where sched.bpf.c looks for the step that runs, so that what the kernel measures is tagged
 * with it. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "outside.h"
#include "pids.h"
#include "sched.h"

#define ONE_STEP_NS 200000 /* calls closer together than this belong to the same step */

const volatile struct ds_outside_config settings = {};
struct ds_control shared = {}; /* in .bss, which is sched.bpf.o's where that is loaded */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ds_marks);
} marks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} followed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} messages SEC(".maps");

SEC("kprobe")
int on_mark(void *ctx)
{
	struct task_struct *task = bpf_get_current_task_btf();
	__u64 now = bpf_ktime_get_ns();
	struct ds_message message = { .kind = DS_MARK, .time_ns = now };
	__u32 pid = task->tgid, zero = 0;
	__u32 *seen = bpf_map_lookup_elem(&followed, &pid);
	struct ds_marks *m = bpf_map_lookup_elem(&marks, &zero);

	if (!seen || !m)
		return 0;
	message.pid = *seen & ~TELL_LOCAL;
	if (!m->pid)
		m->pid = message.pid;
	if (m->pid != message.pid || now - m->last_ns < ONE_STEP_NS)
		return 0;
	m->last_ns = now;
	shared.step = ++m->step;
	message.step = m->step;
	message.tid = pid_in(task, settings.pid_namespace);
	bpf_ringbuf_output(&messages, &message, sizeof(message), BPF_RB_NO_WAKEUP);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
