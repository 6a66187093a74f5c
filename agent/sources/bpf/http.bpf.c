/* What goes through the TCP sockets on which the target serves: the beginning of each message, its
 * end, its length and its time. User space (agent/sources/outside) makes HTTP out of it.
 *
 * The socket tracepoints fire at the end of any call that moves bytes, whichever it is; the memory
 * it moved is found in the arguments of the system call that the task is in. So calls on anything
 * else but sockets cost nothing.
 */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "outside.h"
#include "pids.h"
#include "calls.h"

#define TCP_PROTOCOL 6
#define FAMILY_UNIX 1
#define FAMILY_INET 2
#define FAMILY_INET6 10
#define PEEKED 2 /* MSG_PEEK */
#define PIECES 16 /* of one scattered message that are looked at */
enum { ESTABLISHED = 1, FIN_WAIT1 = 4, CLOSE = 7, CLOSE_WAIT = 8 };

const volatile struct ds_outside_config settings = {};
struct ds_outside_control outside = {};

enum ds_role { DS_NEW, DS_SERVES, DS_PRIVATE };

struct ds_connection {
	__u64 number; /* 0: none yet */
	__u64 arrived_ns; /* since when something waits to be read; 0: nothing does */
	__u32 pid;
	__u8 role;
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct ds_connection);
} connections SEC(".maps");

/* The target's processes: pid in the initial namespace → as the agent sees it, and whether what it
 * sends over Unix sockets is told too. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} followed SEC(".maps");

/* What user space asks for, by pids as the agent sees them: 1, or with Unix sockets ASK_LOCAL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u32);
} asked SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 22);
} messages SEC(".maps");

/* Of marker.bpf.c, which may be loaded anew: the steps' numbers go on. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ds_marks);
} marks SEC(".maps");

struct ds_room {
	struct ds_message head;
	__u8 data[2 * HEAD_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct ds_room);
} room SEC(".maps");

static __always_inline __u32 followed_pid(struct task_struct *task)
{
	__u32 pid = task->tgid;
	__u32 *seen = bpf_map_lookup_elem(&followed, &pid);

	return seen ? *seen & ~TELL_LOCAL : 0;
}

static __always_inline bool tells_local(struct task_struct *task)
{
	__u32 pid = task->tgid;
	__u32 *seen = bpf_map_lookup_elem(&followed, &pid);

	return seen && *seen & TELL_LOCAL;
}

static __always_inline bool is_tcp(struct sock *sk)
{
	return sk->sk_protocol == TCP_PROTOCOL && (sk->__sk_common.skc_family == FAMILY_INET ||
						   sk->__sk_common.skc_family == FAMILY_INET6);
}

static __always_inline void send(struct ds_message *message, __u64 size)
{
	__sync_fetch_and_add(&outside.told, 1);
	if (bpf_ringbuf_output(&messages, message, size, BPF_RB_NO_WAKEUP))
		__sync_fetch_and_add(&outside.dropped, 1);
}

static __always_inline void count_run(__u64 began)
{
	/* The clock is read by each run: its own cost is what one run in 64 adds for all. */
	if ((__sync_fetch_and_add(&outside.runs, 1) & 63) == 0)
		__sync_fetch_and_add(&outside.cost_ns, (bpf_ktime_get_ns() - began) << 6);
}

/* Something about a connection that moves no bytes. */
static __always_inline void
tell(struct ds_connection *c, enum ds_message_kind kind, __u32 tid, __u32 length)
{
	struct ds_message message = {
		.connection = c->number,
		.time_ns = bpf_ktime_get_ns(),
		.pid = c->pid,
		.tid = tid,
		.length = length,
		.kind = kind,
	};

	send(&message, sizeof(message));
}

struct ds_copying {
	struct ds_memory from;
	__u32 length; /* bytes that were moved */
	__u32 at; /* bytes gone by */
	__u32 copied;
};

/* Copies one piece: as much as fits, and of the one that holds the last byte the last eight. */
static long copy_piece(__u32 n, struct ds_copying *c)
{
	__u64 piece[2] = { c->from.start, c->length };
	__u32 zero = 0, size, fits, tail;
	struct ds_room *to = bpf_map_lookup_elem(&room, &zero);

	if (!to)
		return 1;
	if (c->from.pieces) {
		if (n >= c->from.count ||
		    bpf_probe_read_user(piece, sizeof(piece), (void *)(c->from.pieces + 16 * n)))
			return 1;
	} else if (n) {
		return 1;
	}
	size = c->length - c->at;
	if (piece[1] < size)
		size = piece[1];
	/* Only what follows the copied part without a hole may be added to it. */
	if (c->copied == c->at && c->copied < HEAD_BYTES) {
		__u32 start = c->copied;

		fits = HEAD_BYTES - start;
		if (fits > size)
			fits = size;
		/* The compiler knows the bounds and would leave them out; the verifier does not. */
		barrier_var(start);
		start &= HEAD_BYTES - 1;
		barrier_var(fits);
		if (fits && fits <= HEAD_BYTES) {
			if (bpf_probe_read_user(&to->data[start], fits, (void *)piece[0]))
				return 1;
			c->copied += fits;
		}
	}
	c->at += size;
	if (c->at < c->length || !size)
		return 0;
	tail = size < 8 ? size : 8;
	if (!bpf_probe_read_user(to->head.tail, tail, (void *)(piece[0] + size - tail)))
		to->head.tail_length = tail;
	return 1;
}

static __always_inline void
pass_on(struct ds_connection *c, struct task_struct *task, enum ds_message_kind kind, __u32 length,
	__u64 now)
{
	struct ds_copying copying = { .length = length };
	__u32 zero = 0, copied;
	struct ds_room *to = bpf_map_lookup_elem(&room, &zero);

	if (!to)
		return;
	__builtin_memset(&to->head, 0, sizeof(to->head));
	to->head.connection = c->number;
	to->head.time_ns = now;
	to->head.pid = c->pid;
	to->head.tid = pid_in(task, settings.pid_namespace);
	to->head.length = length;
	to->head.kind = kind;
	if (kind == DS_RECEIVED) {
		to->head.arrived_ns = c->arrived_ns;
		c->arrived_ns = 0;
	}
	if (find_memory(task, &copying.from))
		bpf_loop(PIECES, copy_piece, &copying, 0);
	else
		to->head.kind = DS_UNREAD;
	copied = copying.copied;
	if (copied > HEAD_BYTES)
		copied = HEAD_BYTES;
	to->head.copied = copied;
	send(&to->head, sizeof(to->head) + copied);
}

#define WORD(a, b, c, d) ((__u32)(a) | (__u32)(b) << 8 | (__u32)(c) << 16 | (__u32)(d) << 24)

/* What a server reads first: the method of a request, or its first letter. */
static __always_inline bool begins_request(__u32 word, bool whole)
{
	if (!whole) {
		__u8 letter = word;

		return letter == 'P' || letter == 'G' || letter == 'H' || letter == 'D' ||
		       letter == 'O';
	}
	return word == WORD('P', 'O', 'S', 'T') || word == WORD('G', 'E', 'T', ' ') ||
	       word == WORD('H', 'E', 'A', 'D') || word == WORD('P', 'U', 'T', ' ') ||
	       word == WORD('P', 'A', 'T', 'C') || word == WORD('D', 'E', 'L', 'E') ||
	       word == WORD('O', 'P', 'T', 'I');
}

/* The first four bytes, or where there are fewer, the first one. */
static __always_inline bool peek(struct ds_memory *memory, __u32 length, __u32 *word, bool *whole)
{
	__u64 piece[2] = { memory->start, length };

	if (memory->pieces &&
	    bpf_probe_read_user(piece, sizeof(piece), (void *)memory->pieces))
		return false;
	*whole = piece[1] >= 4 && length >= 4;
	return !bpf_probe_read_user(word, *whole ? 4 : 1, (void *)piece[0]);
}

SEC("tp_btf/sock_recv_length")
int on_http_received(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	__s32 length = ctx[1], flags = ctx[2];
	struct task_struct *task = bpf_get_current_task_btf();
	struct ds_connection *c;
	__u32 pid, word = 0;
	bool whole;
	__u64 now;

	if (length <= 0 || flags & PEEKED || !is_tcp(sk))
		return 0;
	pid = followed_pid(task);
	if (!pid)
		return 0;
	now = bpf_ktime_get_ns();
	c = bpf_sk_storage_get(&connections, sk, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!c || c->role == DS_PRIVATE)
		return 0;
	c->pid = pid;
	if (c->role == DS_NEW) {
		struct ds_memory memory;

		if (!find_memory(task, &memory)) {
			/* Whatever it is, it stays unseen: that much is told. */
			c->role = DS_PRIVATE;
			tell(c, DS_UNREAD, pid_in(task, settings.pid_namespace), length);
			return 0;
		}
		if (!peek(&memory, length, &word, &whole))
			return 0;
		if (whole && (word & 0xffff) == 0x0316) { /* a TLS handshake record */
			c->role = DS_PRIVATE;
			tell(c, DS_CIPHERED, pid_in(task, settings.pid_namespace), length);
			return 0;
		}
		if (!begins_request(word, whole))
			return 0;
		c->role = DS_SERVES;
		c->number = __sync_fetch_and_add(&outside.connections, 1) + 1;
	}
	pass_on(c, task, DS_RECEIVED, length, now);
	count_run(now);
	return 0;
}

SEC("tp_btf/sock_send_length")
int on_http_sent(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	__s32 length = ctx[1];
	struct task_struct *task = bpf_get_current_task_btf();
	struct ds_connection *c;
	__u64 now;
	__u32 pid;

	if (length <= 0)
		return 0;
	if (sk->__sk_common.skc_family == FAMILY_UNIX) {
		struct ds_connection local = {};
		struct pid *peer;

		if (!tells_local(task))
			return 0;
		local.pid = followed_pid(task);
		peer = BPF_CORE_READ(sk, sk_peer_pid);
		if (peer)
			local.number = number_in(peer, settings.pid_namespace);
		tell(&local, DS_LOCAL, pid_in(task, settings.pid_namespace), length);
		return 0;
	}
	if (!is_tcp(sk) || !sk->sk_bpf_storage)
		return 0;
	c = bpf_sk_storage_get(&connections, sk, 0, 0);
	if (!c || c->role != DS_SERVES)
		return 0;
	pid = followed_pid(task);
	if (!pid)
		return 0;
	now = bpf_ktime_get_ns();
	c->pid = pid;
	pass_on(c, task, DS_SENT, length, now);
	count_run(now);
	return 0;
}

/* A segment arrived on a connection: since then there is something to be read. */
SEC("tp_btf/tcp_probe")
int on_http_segment(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct sk_buff *skb = (void *)ctx[1];
	struct tcp_skb_cb *segment = (void *)skb->cb;
	struct ds_connection *c;

	if (!sk->sk_bpf_storage)
		return 0;
	c = bpf_sk_storage_get(&connections, sk, 0, 0);
	if (!c || c->arrived_ns || BPF_CORE_READ(segment, end_seq) == BPF_CORE_READ(segment, seq))
		return 0;
	c->arrived_ns = bpf_ktime_get_ns();
	return 0;
}

/* Connections come and go. Whose a new one is, is known when it is read from. */
SEC("tp_btf/inet_sock_set_state")
int on_http_state(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	__s32 before = ctx[1], after = ctx[2];
	struct ds_connection *c;

	if (before == 3 /* SYN_RECV */ && after == ESTABLISHED) {
		bpf_sk_storage_get(&connections, sk, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
		return 0;
	}
	if ((after != CLOSE_WAIT && after != CLOSE) || !sk->sk_bpf_storage)
		return 0;
	c = bpf_sk_storage_get(&connections, sk, 0, 0);
	if (!c || c->role != DS_SERVES)
		return 0;
	/* It broke off, by a reset or by falling silent, rather than close. */
	if (after == CLOSE && sk->sk_err)
		tell(c, DS_PEER_CLOSED, 0, 0);
	tell(c, after == CLOSE ? DS_CLOSED : DS_PEER_CLOSED, 0, 0);
	return 0;
}

/* Run by user space when it has asked for more processes. */
SEC("iter/task")
int find_followed(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	__u32 pid, seen;
	__u32 *how;

	if (!task || task->pid != task->tgid)
		return 0;
	pid = task->tgid;
	seen = pid_in(task, settings.pid_namespace);
	how = bpf_map_lookup_elem(&asked, &seen);
	if (how && *how == ASK_LOCAL)
		seen |= TELL_LOCAL;
	if (how)
		bpf_map_update_elem(&followed, &pid, &seen, BPF_ANY);
	else
		bpf_map_delete_elem(&followed, &pid);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
