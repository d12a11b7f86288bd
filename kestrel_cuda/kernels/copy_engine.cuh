// Hopper's copy engine: a thread has boxes of matrices copied into shared memory, counted in bytes on a barrier there.
// Only for files that are compiled for sm_90a (library.FEATURE_ARCHITECTURES).

// A matrix and its boxes as the driver describes them (backends/cuda_copy_maps.py).
struct CopyMap {
    alignas(64) u64 words[16];
};

// The engine sees the barriers that this thread has made.
__device__ inline void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// The barrier's turn is not over before these bytes have landed, either. Who has not arrived yet says so.
__device__ inline void expect_bytes(u32 barrier, int num_bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

__device__ inline void arrive_expecting(u32 barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
}

// Have the box copied that begins at this column and row. It is always whole: past the matrix's end it is zeros.
__device__ inline void copy_box(u32 to, const CopyMap& map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
