// Hopper's warpgroup mma and what feeds it: barriers in shared memory, copies into it, operands there by descriptor.
// Only for files that are compiled for sm_90a (library.FEATURE_ARCHITECTURES).

constexpr int kWarpgroup = 128;        // threads that issue an mma together; the first one's number is a multiple of it
constexpr int kSwizzledRow = 128;      // bytes of a row of an operand in shared memory

// A barrier turns over when `count` threads have arrived; its parity is that of the turns before.
__device__ inline void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait_barrier(u32 barrier, u32 parity) {
    u32 done = 0;
    while (!done)
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
}

// Start a copy of 16 or 4 bytes into shared memory; one that is not valid writes zeros.
__device__ inline void copy_16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ inline void copy_4(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until this thread's copies have landed, but for the last `kGroups` groups of them.
template <int kGroups>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// What this thread has written to shared memory is seen by mmas that start after the barrier it arrives at next.
__device__ inline void show_to_mma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Where 16 bytes of a row lie in an operand: rows of 128 bytes, eight of them swizzled; the operand begins at a multiple
// of 1024 bytes.
__device__ inline u32 swizzled(int row, int chunk) { return row * kSwizzledRow + (chunk ^ row % 8) * 16; }

// The descriptor of an operand in shared memory with its reduced axis along the rows. `address` may be up to 96 bytes
// inside the first row, which begins later inputs. PTX ISA, "Matrix descriptor": 1024 bytes from eight rows to the next,
// 128-byte swizzle.
__device__ inline u64 operand(u32 address) {
    return (u64)1 << 62 | (u64)(8 * kSwizzledRow >> 4) << 32 | (u64)1 << 16 | (address & 0x3ffff) >> 4;
}

// Before the first mma, and after ordinary instructions have read or written its registers.
__device__ inline void start_mmas() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void commit_mmas() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until this warpgroup's mmas are done, but for the last `kGroups` groups of them.
template <int kGroups>
__device__ inline void await_mmas() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}

// Registers a thread of this warpgroup, as the block's roles part; kept constant in sum over the block.
template <int kRegisters>
__device__ inline void give_registers_back() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
