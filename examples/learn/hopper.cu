// Chapter 10: the scores S = Q K^T of 64 queries and every key, by Hopper's own instructions. One
// warp copies blocks of keys by TMA, a warpgroup multiplies them by wgmma, and mbarriers in shared
// memory are all that the two say to each other. Needs -gencode=arch=compute_90a,code=sm_90a.
#include <cuda.h>
#include <cuda_bf16.h>

#include "learn.cuh"

constexpr int kBlockM = 64, kBlockN = 64, kHeadDim = 64, kStages = 3;
constexpr int kConsumerThreads = 128, kThreads = kConsumerThreads + 32;
constexpr int kTileBytes = kBlockN * kHeadDim * sizeof(__nv_bfloat16);
static_assert(kBlockM == kBlockN, "one size of box serves both tensor maps");

// A swizzled tile begins at a multiple of 1024 bytes. Barriers are named after what they announce.
struct alignas(1024) SharedMemory {
  __nv_bfloat16 q[kBlockM * kHeadDim];
  __nv_bfloat16 k[kStages][kBlockN * kHeadDim];
  uint64_t q_ready, k_ready[kStages], k_free[kStages];
};

__device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// PTX ISA, mbarrier: a phase ends when all arrivals and all announced bytes are there.
__device__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
__device__ void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ void barrier_arrive_expect(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Returns once the phase of this parity has ended; that before the first one counts as odd.
__device__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

// PTX ISA, cp.async.bulk.tensor: one thread asks for a whole box; rows past the end become zeros.
__device__ void tma_load(void* destination, const CUtensorMap* map, uint64_t* barrier, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(destination)),
      "l"(map), "r"(shared_address(barrier)), "r"(0), "r"(row)
      : "memory");
}

// PTX ISA, wgmma matrix descriptor: rows of 128 bytes, swizzled, eight of them 1024 bytes apart.
__device__ uint64_t descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  constexpr uint64_t kNextSlab = uint64_t{1} << 16;  // not read: a row is one slab of 128 bytes
  return kSwizzle128 | kEightRows | kNextSlab | (shared_address(tile) & 0x3ffff) >> 4;
}

// One m64n64k16: s += q k^T over 16 columns; 128 threads hold 32 numbers each of the 64 x 64.
__device__ void multiply(float (&s)[32], uint64_t q, uint64_t k, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;\n}\n"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3]), "+f"(s[4]), "+f"(s[5]), "+f"(s[6]),
        "+f"(s[7]), "+f"(s[8]), "+f"(s[9]), "+f"(s[10]), "+f"(s[11]), "+f"(s[12]), "+f"(s[13]),
        "+f"(s[14]), "+f"(s[15]), "+f"(s[16]), "+f"(s[17]), "+f"(s[18]), "+f"(s[19]), "+f"(s[20]),
        "+f"(s[21]), "+f"(s[22]), "+f"(s[23]), "+f"(s[24]), "+f"(s[25]), "+f"(s[26]), "+f"(s[27]),
        "+f"(s[28]), "+f"(s[29]), "+f"(s[30]), "+f"(s[31])
      : "l"(q), "l"(k), "r"(accumulate));
}

__device__ void produce(SharedMemory& shared, const CUtensorMap& q_map, const CUtensorMap& k_map,
                        int first_row, int blocks) {
  barrier_arrive_expect(&shared.q_ready, kTileBytes);
  tma_load(shared.q, &q_map, &shared.q_ready, first_row);
  for (int block = 0; block < blocks; ++block) {
    int stage = block % kStages, round = block / kStages;
    barrier_wait(&shared.k_free[stage], (round & 1) ^ 1);  // at once in the first round
    barrier_arrive_expect(&shared.k_ready[stage], kTileBytes);
    tma_load(shared.k[stage], &k_map, &shared.k_ready[stage], block * kBlockN);
  }
}

// Warp w of the warpgroup holds rows 16 w to 16 w + 15, two neighbouring columns at a time.
__device__ void store(const float (&s)[32], float* scores, int first_row, int first_key, int rows,
                      int keys) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 32; ++i) {
    int row = first_row + 16 * warp + lane / 4 + 8 * (i / 2 % 2);
    int key = first_key + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    if (row < rows && key < keys) scores[static_cast<int64_t>(row) * keys + key] = s[i];
  }
}

__device__ void consume(SharedMemory& shared, float* scores, int first_row, int blocks, int rows,
                        int keys) {
  barrier_wait(&shared.q_ready, 0);
  for (int block = 0; block < blocks; ++block) {
    int stage = block % kStages, round = block / kStages;
    barrier_wait(&shared.k_ready[stage], round & 1);
    float s[32];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    uint64_t q = descriptor(shared.q), k = descriptor(shared.k[stage]);
    for (int step = 0; step < kHeadDim / 16; ++step) {
      multiply(s, q + step * (32 >> 4), k + step * (32 >> 4), step > 0);  // 16 columns: 32 bytes
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    barrier_arrive(&shared.k_free[stage]);
    store(s, scores, first_row, block * kBlockN, rows, keys);
  }
}

__global__ void __launch_bounds__(kThreads)
    scores_kernel(const __grid_constant__ CUtensorMap q_map,
                  const __grid_constant__ CUtensorMap k_map, float* scores, int rows, int keys) {
  __shared__ SharedMemory shared;
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_ready, 1);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(&shared.k_ready[stage], 1);
      barrier_init(&shared.k_free[stage], kConsumerThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // TMA sees them too
  }
  __syncthreads();
  int first_row = blockIdx.x * kBlockM, blocks = (keys + kBlockN - 1) / kBlockN;
  if (threadIdx.x < kConsumerThreads) {
    consume(shared, scores, first_row, blocks, rows, keys);
  } else if (threadIdx.x == kConsumerThreads) {
    produce(shared, q_map, k_map, first_row, blocks);
  }
}

// A description of x (rows, 64) for the copy engine: boxes of 64 rows, swizzled by 128 bytes.
CUtensorMap tensor_map(Array<__nv_bfloat16>& x, int rows) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                              cudaEnableDefault, &found));
  CUtensorMap map;
  cuuint64_t sizes[2] = {kHeadDim, static_cast<cuuint64_t>(rows)};
  cuuint64_t row_stride[1] = {kHeadDim * sizeof(__nv_bfloat16)};
  cuuint32_t box[2] = {kHeadDim, kBlockN}, steps[2] = {1, 1};
  CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x.device, sizes, row_stride, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (found != cudaDriverEntryPointSuccess || result != CUDA_SUCCESS) {
    std::fprintf(stderr, "no tensor map\n");
    std::exit(1);
  }
  return map;
}

int main() {
  int rows = 150, keys = 1000;  // neither is a multiple of a block
  Array<__nv_bfloat16> q(rows * kHeadDim), k(keys * kHeadDim);
  Array scores(static_cast<size_t>(rows) * keys);
  q.fill(0);
  k.fill(1);
  scores_kernel<<<(rows + kBlockM - 1) / kBlockM, kThreads>>>(
      tensor_map(q, rows), tensor_map(k, keys), scores.device, rows, keys);
  finish_kernel();

  std::vector<double> expected(scores.host.size());
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < keys; ++j)
      for (int d = 0; d < kHeadDim; ++d)
        expected[i * keys + j] +=
            double(float(q.host[i * kHeadDim + d])) * double(float(k.host[j * kHeadDim + d]));
  expect_close("q k^T", scores, expected, 1e-4);
}
