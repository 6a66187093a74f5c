/* What http.bpf.c and marker.bpf.c share with user space (agent/sources/outside/messages.py). */
#ifndef DSAGENT_OUTSIDE_H
#define DSAGENT_OUTSIDE_H

enum ds_message_kind {
	DS_RECEIVED = 1, /* a socket of the target was read: `length` bytes, the first ones copied */
	DS_SENT = 2, /* it was written to */
	DS_PEER_CLOSED = 3, /* its client will send no more */
	DS_CLOSED = 4, /* the connection is over */
	DS_CIPHERED = 5, /* it begins like TLS */
	DS_UNREAD = 6, /* moved by a call whose memory is not looked at: io_uring, splice */
	DS_MARK = 7, /* a step begins */
	DS_LOCAL = 8, /* something was sent over a Unix socket of the target */
};

struct ds_message {
	__u64 connection; /* a number of ours; 0: none. Of DS_LOCAL: the pid at the other end */
	__u64 time_ns; /* when the call ended, or what else is told happened */
	__u64 arrived_ns; /* when the first byte of it came in; 0: not known */
	__u64 step; /* of DS_MARK: its number */
	__u32 pid; /* as the agent sees them */
	__u32 tid;
	__u32 length; /* bytes moved */
	__u16 copied; /* of these, at the beginning */
	__u8 kind;
	__u8 tail_length;
	__u8 tail[8]; /* the last bytes of them */
};

#define HEAD_BYTES 4096 /* copied at most of what one call moves */
#define ASK_LOCAL 2
#define TELL_LOCAL (1U << 31) /* beside a pid, which is smaller */

struct ds_outside_config {
	__u32 pid_namespace; /* the agent's; 0: the initial one */
	__u32 target_pid;
};

struct ds_marks {
	__u64 last_ns;
	__u64 step;
	__u32 pid; /* the process whose calls count: the first to make one, until user space says */
	__u32 padding;
};

/* Counters that user space reads. */
struct ds_outside_control {
	__u64 connections; /* numbers given so far */
	__u64 told; /* messages but marks, whether they found room or not */
	__u64 dropped; /* of these, the ones that found the ring full */
	__u64 runs;
	__u64 cost_ns;
};

#endif
