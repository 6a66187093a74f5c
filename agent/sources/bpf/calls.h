/* Where the memory is that the running system call moves to or from a socket. */
#ifndef DSAGENT_CALLS_H
#define DSAGENT_CALLS_H

#if defined(__TARGET_ARCH_x86)
#define SYSCALL_NUMBER(regs) ((__s64)BPF_CORE_READ(regs, orig_ax))
#define SECOND(regs) BPF_CORE_READ(regs, si)
#define THIRD(regs) BPF_CORE_READ(regs, dx)
enum { NR_READ = 0, NR_WRITE = 1, NR_READV = 19, NR_WRITEV = 20, NR_SENDTO = 44,
       NR_RECVFROM = 45, NR_SENDMSG = 46, NR_RECVMSG = 47 };
#elif defined(__TARGET_ARCH_arm64)
#define SYSCALL_NUMBER(regs) ((__s64)(__s32)BPF_CORE_READ(regs, syscallno))
#define SECOND(regs) BPF_CORE_READ(regs, regs[1])
#define THIRD(regs) BPF_CORE_READ(regs, regs[2])
enum { NR_READ = 63, NR_WRITE = 64, NR_READV = 65, NR_WRITEV = 66, NR_SENDTO = 206,
       NR_RECVFROM = 207, NR_SENDMSG = 211, NR_RECVMSG = 212 };
#else
#error "no system call numbers for this architecture"
#endif

struct ds_memory {
	__u64 pieces; /* address of an array of struct iovec in the task's memory; 0: one piece */
	__u64 count; /* of these */
	__u64 start; /* of the one piece */
};

/* Where the bytes are that the running system call moves. */
static __always_inline bool find_memory(struct task_struct *task, struct ds_memory *found)
{
	struct pt_regs *regs = (struct pt_regs *)bpf_task_pt_regs(task);
	__u64 second = SECOND(regs);

	found->pieces = 0;
	found->count = 0;
	found->start = second;
	switch (SYSCALL_NUMBER(regs)) {
	case NR_READ:
	case NR_WRITE:
	case NR_SENDTO:
	case NR_RECVFROM:
		return true;
	case NR_READV:
	case NR_WRITEV:
		found->pieces = second;
		found->count = THIRD(regs);
		return true;
	case NR_SENDMSG:
	case NR_RECVMSG: {
		__u64 pair[2]; /* msg_iov, msg_iovlen of struct user_msghdr */

		if (bpf_probe_read_user(pair, sizeof(pair), (void *)(second + 16)))
			return false;
		found->pieces = pair[0];
		found->count = pair[1];
		return true;
	}
	}
	return false;
}

#endif
