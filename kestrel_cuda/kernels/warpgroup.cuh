// Hopper's warpgroup mma and what feeds it: copies into shared memory, operands there by descriptor.
// Only for files that are compiled for sm_90a (library.FEATURE_ARCHITECTURES).

constexpr int kWarpgroup = 128;        // threads that issue an mma together; the first one's number is a multiple of it
constexpr int kSwizzledRow = 128;      // bytes of a row of an operand in shared memory

// Start a copy of 16 bytes into shared memory; one that is not valid writes zeros.
__device__ inline void copy_16(u32 to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until this thread's copies have landed, but for the last `kGroups` groups of them.
template <int kGroups>
__device__ inline void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// What this thread has written to shared memory is seen by mmas that start after the barrier it arrives at next, and what
// it has seen of others' by those that it starts.
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

// Nothing reads what mmas have summed up before this.
template <int kCount>
__device__ inline void keep_until_here(float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

template <int kCount>
__device__ inline void keep_until_here(int (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(sums[i])::"memory");
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
