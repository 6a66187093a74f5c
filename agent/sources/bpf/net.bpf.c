/* TCP sockets of the target that cannot pass on what was written to them: segments sent again, and
 * clients that do not read. A socket belongs to the thread of the target that last wrote to it. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include "sched.h"
#include "maps.h"
#include "send.h"

#define NOSPACE_BIT 2 /* SOCK_NOSPACE of sk_socket->flags */
#define TCP_PROTOCOL 6
enum { FIN_WAIT2 = 5, TIME_WAIT = 6, CLOSED = 7 };
#define FAMILY_INET 2
#define FAMILY_INET6 10

struct ds_socket {
	__u32 pid;
	__u32 tid;
	__u64 unacked_ns; /* since when what is due next could have been acknowledged, and was not */
	__u64 full_ns; /* since when it takes no more; 0: it does */
	__u64 lost_ns; /* since when a segment has been missing that was sent again; 0: none */
	__u32 written; /* sequence number after what was last written */
	__u32 lost_end; /* likewise after the segment last sent again */
};

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct ds_socket);
} sockets SEC(".maps");

static __always_inline bool after(__u32 a, __u32 b)
{
	return (__s32)(a - b) > 0;
}

static __always_inline struct ds_socket *socket_of(struct sock *sk)
{
	if (!sk->sk_bpf_storage) /* most sockets: saves the call */
		return 0;
	return bpf_sk_storage_get(&sockets, sk, 0, 0);
}

/* What the client lets come, in bytes; 0: its buffer is full. */
static __always_inline __u32 window_of(struct sock *sk)
{
	return BPF_CORE_READ((struct tcp_sock *)sk, snd_wnd);
}

/* Tell [*since, now), and go on at `next`. */
static __always_inline void
tell(struct ds_socket *s, enum ds_kind kind, __u64 *since, __u64 now, __u64 next)
{
	struct ds_cpu *cpu = this_cpu();
	struct ds_fact fact = { .kind = kind, .exact = 1, .cpu = -1, .count = 1 };

	fact.start_ns = *since;
	*since = next;
	if (!cpu || !fact.start_ns || fact.start_ns >= now)
		return;
	fact.pid = s->pid;
	fact.tid = s->tid;
	fact.step = shared.step;
	fact.end_ns = now;
	fact.ns = now - fact.start_ns;
	send(cpu, &fact);
	count_run(cpu, now);
}

/* Whatever was written to a socket, `ctx[1]` bytes or a negative error. */
SEC("tp_btf/sock_send_length")
int on_send(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	__s32 sent = ctx[1];
	struct ds_thread *t = thread_of(bpf_get_current_task_btf());
	struct tcp_sock *tcp = (void *)sk;
	struct ds_socket *s;
	__u64 now, flags;

	if (!t || sk->sk_protocol != TCP_PROTOCOL ||
	    (sk->__sk_common.skc_family != FAMILY_INET && sk->__sk_common.skc_family != FAMILY_INET6))
		return 0;
	s = bpf_sk_storage_get(&sockets, sk, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!s)
		return 0;
	now = bpf_ktime_get_ns();
	s->pid = t->pid;
	s->tid = t->tid;
	if (!s->unacked_ns || !after(s->written, BPF_CORE_READ(tcp, snd_una)))
		s->unacked_ns = now;
	s->written = BPF_CORE_READ(tcp, write_seq);
	flags = BPF_CORE_READ(sk, sk_socket, flags);
	if (!s->full_ns && flags & (1 << NOSPACE_BIT))
		s->full_ns = now;
	else if (s->full_ns && sent > 0)
		tell(s, DS_BACKPRESSURE, &s->full_ns, now, flags & (1 << NOSPACE_BIT) ? now : 0);
	return 0;
}

/* Each time a segment is sent again: the time since it was first, or since the last time. To a
 * client that takes nothing more it is sent to ask whether it does again: that loses nothing. */
SEC("tp_btf/tcp_retransmit_skb")
int on_retransmit(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct sk_buff *skb = (void *)ctx[1];
	struct ds_socket *s = socket_of(sk);
	struct tcp_skb_cb *segment = (void *)skb->cb;
	__u64 now;

	if (!s)
		return 0;
	if (!window_of(sk)) {
		s->lost_ns = 0;
		return 0;
	}
	now = bpf_ktime_get_ns();
	if (!s->lost_ns)
		s->lost_ns = s->unacked_ns;
	s->lost_end = BPF_CORE_READ(segment, end_seq);
	tell(s, DS_RETRANSMIT, &s->lost_ns, now, now);
	return 0;
}

/* A segment arrived, which may acknowledge what was sent again, or anything, or open the window:
 * from then on it is the rest that is due. */
SEC("tp_btf/tcp_probe")
int on_segment(__u64 *ctx)
{
	struct sock *sk = (void *)ctx[0];
	struct sk_buff *skb = (void *)ctx[1];
	struct ds_socket *s = socket_of(sk);
	struct tcp_skb_cb *segment = (void *)skb->cb;
	__u32 acked;
	__u64 now;

	if (!s)
		return 0;
	now = bpf_ktime_get_ns();
	acked = BPF_CORE_READ(segment, ack_seq);
	if (!window_of(sk) || after(acked, BPF_CORE_READ((struct tcp_sock *)sk, snd_una)))
		s->unacked_ns = now;
	if (s->lost_ns && !after(s->lost_end, acked))
		tell(s, DS_RETRANSMIT, &s->lost_ns, now, 0);
	return 0;
}

/* A connection is closed: no more will be written, though what was may still be sent again. */
SEC("tp_btf/inet_sock_set_state")
int on_socket_state(__u64 *ctx)
{
	struct ds_socket *s = socket_of((struct sock *)ctx[0]);
	__s32 state = ctx[2];
	__u64 now;

	if (!s)
		return 0;
	now = bpf_ktime_get_ns();
	tell(s, DS_BACKPRESSURE, &s->full_ns, now, 0);
	if (state == FIN_WAIT2 || state == TIME_WAIT || state == CLOSED)
		tell(s, DS_RETRANSMIT, &s->lost_ns, now, 0);
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
