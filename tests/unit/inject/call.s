# `call` and `callback` of agent/inject/code.py. Offsets are those of the block there.
.set XSAVE, 0
.set REGS, 0x3000
.set FLAGS, REGS+0x80
.set MXCSR, REGS+0x88
.set ENSURE, REGS+0x90
.set RELEASE, REGS+0x98
.set ADD, REGS+0xa0
.set RUN, REGS+0xa8
.set TEXT, REGS+0xb0
.set RETURNED, REGS+0xb8
.set QUEUED, REGS+0xc0
.set STATE, REGS+0xc8
.set RESULT, REGS+0xd0
start:
  movabs $0x1122334455667788, %rbx    # the block
  mov $-1, %eax
  mov %eax, %edx
  xsave64 XSAVE(%rbx)
  fninit                          # the state that the ABI promises to a function
  ldmxcsr MXCSR(%rbx)
  cld
  cmpq $0, ENSURE(%rbx)
  je queue
  call *ENSURE(%rbx)
  mov %eax, %r12d
  cmp $1, %eax                    # PyGILState_UNLOCKED: it was without the lock
  jne release
  mov %rbx, %rdi
  call callback
release:
  mov %r12d, %edi
  call *RELEASE(%rbx)
  cmp $1, %r12d
  je back
queue:
  lea callback(%rip), %rdi
  mov %rbx, %rsi
  call *ADD(%rbx)
  cltq
  mov %rax, QUEUED(%rbx)
back:                             # from here on: every register as it was
  movq $1, RETURNED(%rbx)
  mov $-1, %eax
  mov %eax, %edx
  xrstor64 XSAVE(%rbx)
  lea FLAGS(%rbx), %rsp
  popfq
  mov REGS+0x00(%rbx), %rax
  mov REGS+0x08(%rbx), %rcx
  mov REGS+0x10(%rbx), %rdx
  mov REGS+0x18(%rbx), %rsi
  mov REGS+0x20(%rbx), %rdi
  mov REGS+0x28(%rbx), %rbp
  mov REGS+0x30(%rbx), %r8
  mov REGS+0x38(%rbx), %r9
  mov REGS+0x40(%rbx), %r10
  mov REGS+0x48(%rbx), %r11
  mov REGS+0x50(%rbx), %r12
  mov REGS+0x58(%rbx), %r13
  mov REGS+0x60(%rbx), %r14
  mov REGS+0x68(%rbx), %r15
  mov REGS+0x70(%rbx), %rsp
  mov REGS+0x78(%rbx), %rbx
  jmp *0f(%rip)
0:
  .quad 0x99aabbccddeeff00         # where to go on
callback:                             # from here on: every register as it was
  push %rbx
  mov %rdi, %rbx
  movq $1, STATE(%rbx)
  mov TEXT(%rbx), %rdi
  call *RUN(%rbx)
  cltq
  mov %rax, RESULT(%rbx)
  movq $2, STATE(%rbx)
  xor %eax, %eax
  pop %rbx
  ret
