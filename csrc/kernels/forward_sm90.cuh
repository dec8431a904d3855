// Forward for sm_90a: wgmma on tiles that TMA brings. A CTA has one warpgroup that loads and two or
// three that compute, 64 queries each; keys and values pass through rings of shared memory, from
// the last block that a tile sees to the first. docs/forward_sm90.md draws the pipeline.
#pragma once

#include <cfloat>

#include "common/params.h"
#include "host/launch.cuh"
#include "host/tensor_map.h"
#include "kernels/kernels.h"
#include "plan/tile_config.h"
#include "ptx/sm90.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/mask_apply.cuh"
#include "tile/reference_softmax.cuh"
#include "tile/rescore.cuh"
#include "tile/scheduler.cuh"
#include "tile/special.cuh"

namespace flashattn {

struct ForwardSm90Params {
  CUtensorMap q, k, v;
  ForwardParams forward;
  ForwardSchedule schedule;
};

// What a CTA works on at a time.
template <int kBlockM, int kBlockN>
struct ForwardSm90Work {
  tile::TileCoord coord;
  SeqRows k_rows;
  SequenceMask mask;
  BlockRange keys;
  int first_row, head_k;

  __device__ __forceinline__ ForwardSm90Work(const ForwardSm90Params& params, uint32_t index) {
    const ProblemShape& shape = params.forward.shape;
    coord = tile::ordered_tile(shape.seqlens_q, shape.batch, shape.heads_q, kBlockM,
                               params.schedule.heads_together, index);
    // Under a causal mask the last queries see most keys: they start first.
    first_row = (coord.blocks - 1 - coord.block) * kBlockM;
    k_rows = shape.seqlens_k.sequence(coord.batch);
    k_rows = {__shfl_sync(~0u, k_rows.begin, 0), __shfl_sync(~0u, k_rows.length, 0)};
    head_k = __shfl_sync(~0u, coord.head / shape.heads_per_group(), 0);
    mask = {shape.mask, coord.rows.length, k_rows.length};
    keys = mask.key_blocks(first_row, kBlockM, kBlockN);
    keys = {__shfl_sync(~0u, keys.begin, 0), __shfl_sync(~0u, keys.end, 0),
            __shfl_sync(~0u, keys.full_begin, 0), __shfl_sync(~0u, keys.full_end, 0)};
  }

  // Packed tiles are counted by a bound, and some rows may not be used.
  __device__ __forceinline__ bool nothing() const {
    return coord.block < 0 || first_row >= coord.rows.length;
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
struct ForwardSm90 {
  static constexpr Sm90ForwardTile kTile = sm90_forward_tile({kHeadDim, kHeadDimV});
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kWarpgroups = kBlockM / 64;  // that compute
  static constexpr int kThreads = 128 * (kWarpgroups + 1);
  static constexpr int kRegisters = kWarpgroups == 2 ? 232 : 160;
  static constexpr int kLoaderRegisters = kWarpgroups == 2 ? 40 : 32;
  static constexpr int kScanThreads = 96;
  static constexpr bool kOwnOut = kTile.own_out;

  using E = tile::Element<kType>;
  using TileQ = tile::SmemTile<kBlockM, round_up_64(kHeadDim)>;
  using TileK = tile::SmemTile<kBlockN, round_up_64(kHeadDim)>;
  using TileV = tile::SmemTile<kBlockN, round_up_64(kHeadDimV)>;
  using TileO = tile::SmemTile<kBlockM, round_up_64(kHeadDimV)>;
  using Work = ForwardSm90Work<kBlockM, kBlockN>;
  using Scores = tile::Accumulator<16, kBlockN>;
  using Output = tile::Accumulator<16, kHeadDimV>;
  using Packed = tile::PackedAccumulator<16, kBlockN>;
  // Probabilities in bf16 have fp32's range.
  using Softmax = tile::ReferenceSoftmax<kType == DType::kBFloat16>;

  // Barriers are named after the event that completes a phase.
  struct Shared {
    uint8_t q[TileQ::kBytes];
    uint8_t k[kStages][TileK::kBytes];
    uint8_t v[kStages][TileV::kBytes];
    uint8_t out[kOwnOut ? TileO::kBytes : 8];  // otherwise in q's place
    uint64_t q_full, q_empty;
    uint64_t k_full[kStages], k_empty[kStages];
    uint64_t v_full[kStages], v_empty[kStages];
    uint64_t v_landed[kStages];  // of partial blocks, which are scanned before they are full
    int special;                 // a NaN or Inf that some row may see was taken out of a block of V
  };
  static_assert(sizeof(Shared) <= sm90_forward_smem_bytes({kHeadDim, kHeadDimV}));
  static_assert(kOwnOut || TileO::kBytes <= TileQ::kBytes, "the output is staged in Q's place");

  enum NamedBarrier { kScanned = 1, kOwnQueries = 2 };  // kOwnQueries: one a warpgroup

  // A place in the rings: blocks so far.
  struct Place {
    uint32_t count = 0;
    __device__ __forceinline__ void advance() { ++count; }
    __device__ __forceinline__ int stage() const { return count % kStages; }
    __device__ __forceinline__ uint32_t parity() const { return count / kStages & 1; }
  };

  static __device__ __forceinline__ uint32_t address(const void* shared) {
    return ptx::shared_address(shared);
  }

  static __device__ __forceinline__ void init(Shared& shared) {
    constexpr int kConsumers = 4 * kWarpgroups;  // warps
    ptx::mbarrier_init(address(&shared.q_full), 1);
    ptx::mbarrier_init(address(&shared.q_empty), kConsumers);
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(address(&shared.k_full[i]), 1);
      ptx::mbarrier_init(address(&shared.k_empty[i]), kConsumers);
      ptx::mbarrier_init(address(&shared.v_full[i]), 1);
      ptx::mbarrier_init(address(&shared.v_empty[i]), kConsumers);
      ptx::mbarrier_init(address(&shared.v_landed[i]), 1);
    }
    shared.special = 0;
    ptx::fence_mbarrier_init();
  }

  // One thread starts the copy of a tile: boxes of 64 columns, one below the other.
  template <class Tile>
  static __device__ __forceinline__ void load(const CUtensorMap& map, uint32_t tile, uint64_t& full,
                                              int row, int head, int batch) {
    if (threadIdx.x % 32 != 0) return;
    ptx::mbarrier_arrive_expect(address(&full), Tile::kBytes);
#pragma unroll
    for (int slab = 0; slab < Tile::kCols / 64; ++slab) {
      ptx::tma_load_4d(tile + slab * Tile::kSlabBytes, &map, address(&full), 64 * slab, row, head,
                       batch);
    }
  }

  // One warp: all copies.
  static __device__ __forceinline__ void produce(const ForwardSm90Params& params, Shared& shared) {
    const ProblemShape& shape = params.forward.shape;
    Place place;
    uint32_t q_parity = 0;
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < params.schedule.tiles; index += gridDim.x) {
      Work work(params, index);
      if (work.nothing()) continue;
      // Packed tensors are one batch, in which a sequence starts at a row.
      int q_batch = shape.seqlens_q.packed() ? 0 : static_cast<int>(work.coord.batch);
      int k_batch = shape.seqlens_k.packed() ? 0 : static_cast<int>(work.coord.batch);
      int q_row = static_cast<int>(work.coord.rows.begin) + work.first_row;
      int k_row = static_cast<int>(work.k_rows.begin);
      ptx::mbarrier_wait(address(&shared.q_empty), q_parity ^ 1);
      q_parity ^= 1;
      load<TileQ>(params.q, address(shared.q), shared.q_full, q_row, work.coord.head, q_batch);
#pragma unroll 1
      for (int block = work.keys.end - 1; block >= work.keys.begin; --block, place.advance()) {
        int stage = place.stage(), row = k_row + block * kBlockN;
        ptx::mbarrier_wait(address(&shared.k_empty[stage]), place.parity() ^ 1);
        load<TileK>(params.k, address(shared.k[stage]), shared.k_full[stage], row, work.head_k,
                    k_batch);
        ptx::mbarrier_wait(address(&shared.v_empty[stage]), place.parity() ^ 1);
        uint64_t& full =
            work.keys.partial(block) ? shared.v_landed[stage] : shared.v_full[stage];
        load<TileV>(params.v, address(shared.v[stage]), full, row, work.head_k, k_batch);
      }
    }
  }

  // kScanThreads threads: take the NaN and Inf out of partial blocks of V, see tile/special.cuh.
  static __device__ __forceinline__ void scan(const ForwardSm90Params& params, Shared& shared) {
    Place place;
    uint32_t landed_parities = 0;  // a bit a stage
    int thread = threadIdx.x % 128 - (128 - kScanThreads);
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < params.schedule.tiles; index += gridDim.x) {
      Work work(params, index);
      if (work.nothing()) continue;
#pragma unroll 1
      for (int block = work.keys.end - 1; block >= work.keys.begin; --block, place.advance()) {
        if (!work.keys.partial(block)) continue;
        int stage = place.stage();
        ptx::mbarrier_wait(address(&shared.v_landed[stage]), landed_parities >> stage & 1);
        landed_parities ^= 1u << stage;
        int rows = work.k_rows.length - block * kBlockN;
        if (tile::zero_specials_below<E, TileV>(address(shared.v[stage]), rows, thread,
                                                kScanThreads)) {
          shared.special = 1;
        }
        ptx::fence_async_shared();
        ptx::barrier_sync(kScanned, kScanThreads);
        if (thread == 0) ptx::mbarrier_arrive(address(&shared.v_full[stage]));
      }
    }
  }

  // One of the warpgroups that compute.
  struct Consumer {
    const ForwardSm90Params& params;
    Shared& shared;
    int warpgroup, warp;  // `warp` of the CTA's computing warps
    float scale_log2;
    uint64_t q_tile, k_tile, v_tile;  // descriptors

    __device__ __forceinline__ Consumer(const ForwardSm90Params& p, Shared& s)
        : params(p), shared(s), warpgroup(tile::warp_index() / 4 - 1), warp(tile::warp_index() - 4) {
      // A scale of 0 would make hidden scores NaN: the least normal number instead. The sign of a
      // negative one goes to Q.
      float scale = params.forward.shape.softmax_scale;
      scale_log2 = (scale == 0.f ? FLT_MIN : fabsf(scale)) * tile::kLog2E;
      q_tile = ptx::wgmma_descriptor(address(shared.q) + warpgroup * 64 * TileQ::kPitch);
      k_tile = ptx::wgmma_descriptor(address(shared.k));
      v_tile = ptx::wgmma_descriptor(address(shared.v), TileV::kSlabBytes);
    }

    __device__ __forceinline__ static void wait(uint64_t (&barriers)[kStages], Place place) {
      ptx::mbarrier_wait(address(&barriers[place.stage()]), place.parity());
    }
    __device__ __forceinline__ static void arrive(uint64_t& barrier) {
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(address(&barrier));
    }

    // Starts S = Q K^T.
    __device__ __forceinline__ void start_scores(Scores& scores, Place place) const {
      wait(shared.k_full, place);
      uint64_t k = ptx::wgmma_advance(k_tile, place.stage() * TileK::kBytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
        int slab = step / 4, within = step % 4 * 32;
        ptx::Wgmma<E, kBlockN>::ss(scores[0],
                                   ptx::wgmma_advance(q_tile, slab * TileQ::kSlabBytes + within),
                                   ptx::wgmma_advance(k, slab * TileK::kSlabBytes + within),
                                   step > 0);
      }
      ptx::wgmma_commit();
    }

    // Starts O += P V.
    __device__ __forceinline__ void start_values(Output& out, const Packed& p, Place place) const {
      wait(shared.v_full, place);
      uint64_t v = ptx::wgmma_advance(v_tile, place.stage() * TileV::kBytes);
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockN / 16; ++step) {
        ptx::Wgmma<E, kHeadDimV>::rs(out[0], p[step][0],
                                     ptx::wgmma_advance(v, step * 16 * TileV::kPitch));
      }
      ptx::wgmma_commit();
    }

    // The rows of this warp in the sequence.
    __device__ __forceinline__ int warp_row(const Work& work) const {
      return work.first_row + 16 * warp;
    }

    // What the output has to be scaled by before it takes more.
    struct Step {
      float alpha[2] = {1.f, 1.f};
      bool moved = false;
    };

    // S of a block becomes P, where rows may be masked or may need another reference.
    __device__ __forceinline__ float2 soften_carefully(const Work& work, int block, bool partial,
                                                       Softmax& softmax, Scores& scores,
                                                       Step& step) const {
      if (partial) {
        tile::apply_mask<false>(scores, work.mask, warp_row(work), block * kBlockN,
                                -tile::kInfinity);
      }
      typename Softmax::Exponents exponents = softmax.exponents(scale_log2);
      if (softmax.watching()) step.moved = softmax.raise(scores, scale_log2, step.alpha, exponents);
      return Softmax::exponentiate(scores, exponents);
    }

    // A row left its room, and its scores are lost: computes them again, and watches from here on.
    __device__ __forceinline__ float2 redo(const Work& work, int block, bool partial,
                                           Softmax& softmax, Scores& scores, Step& step) const {
      const ForwardParams& forward = params.forward;
      tile::GlobalRows keys(forward.k, work.coord.batch, work.k_rows, work.head_k,
                            forward.shape.headdim);
      tile::rescore<E, TileQ, kHeadDim>(scores, address(shared.q), 16 * warp, keys,
                                        block * kBlockN);
      softmax.watch |= Softmax::kAlarmed;
      return soften_carefully(work, block, partial, softmax, scores, step);
    }

    __device__ __forceinline__ void soften(const Work& work, int block, bool partial,
                                           Softmax& softmax, Scores& scores, Step& step) const {
      float2 fresh;
      bool watching = softmax.watching();
      if (partial || watching) {
        fresh = soften_carefully(work, block, partial, softmax, scores, step);
      } else {
        fresh = Softmax::exponentiate(scores, softmax.exponents(scale_log2));
      }
      // The branch depends on all probabilities: without it ptxas moves their computation below
      // the wait for P V, and nothing overlaps.
      if (softmax.left_room(fresh) && !watching) {
        fresh = redo(work, block, partial, softmax, scores, step);
      }
      softmax.add(fresh);
    }

    static __device__ __forceinline__ void rescale(Output& out, const Step& step) {
#pragma unroll
      for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[0][n][e] *= step.alpha[e / 2];
    }

    // The pass over the blocks [keys.begin, keys.end), the last one first. `place`: of the last
    // one. S of a block is computed beside P V of the block before, and its softmax beside the
    // rest of that.
    __device__ __forceinline__ void attend(const Work& work, const BlockRange& keys, Place& place,
                                           Softmax& softmax, Output& out) const {
      Scores scores;
      Packed p;
      place.count = __shfl_sync(~0u, place.count, 0);
      Place before = place;
      start_scores(scores, place);
      ptx::wgmma_wait<0>();
      ptx::hold(scores[0]);
      arrive(shared.k_empty[place.stage()]);
      place.advance();
      {
        Step step;
        soften(work, keys.end - 1, keys.partial(keys.end - 1), softmax, scores, step);
      }
      tile::pack_accumulator<E>(p, scores);
#pragma unroll 1
      for (int block = keys.end - 2; block >= keys.begin; --block) {
        start_scores(scores, place);
        start_values(out, p, before);
        ptx::wgmma_wait<1>();
        ptx::hold(scores[0]);
        arrive(shared.k_empty[place.stage()]);
        Step step;
        soften(work, block, keys.partial(block), softmax, scores, step);
        ptx::wgmma_wait<0>();
        ptx::hold(out[0]);
        arrive(shared.v_empty[before.stage()]);
        if (step.moved) rescale(out, step);
        tile::pack_accumulator<E>(p, scores);
        before = place;
        place.advance();
      }
      start_values(out, p, before);
      ptx::wgmma_wait<0>();
      ptx::hold(out[0]);
      arrive(shared.v_empty[before.stage()]);
    }

    // Blocks that other warpgroups of the CTA see.
    __device__ __forceinline__ void skip(int blocks, Place& place) const {
#pragma unroll 1
      for (; blocks > 0; --blocks, place.advance()) {
        wait(shared.k_full, place);
        arrive(shared.k_empty[place.stage()]);
        wait(shared.v_full, place);
        arrive(shared.v_empty[place.stage()]);
      }
    }

    // Makes Q what the products need: the sign of a negative scale, and zeros in rows that belong
    // to another sequence or to none, whose scores could make the warp watch.
    __device__ __forceinline__ void prepare_queries(const Work& work) const {
      bool negate = params.forward.shape.softmax_scale < 0.f;
      int rows = work.coord.rows.length - work.first_row - 64 * warpgroup;
      if (!negate && rows >= 64) return;
      uint32_t q = address(shared.q) + warpgroup * 64 * TileQ::kPitch;
      uint32_t sign = negate ? 0x80008000u : 0u;
#pragma unroll 1
      for (int chunk = threadIdx.x % 128; chunk < 64 * TileQ::kCols / 8; chunk += 128) {
        int row = chunk / 8 % 64;
        uint32_t at = q + chunk / (64 * 8) * TileQ::kSlabBytes + chunk % (64 * 8) * 16;
        uint4 x = ptx::load_shared_v4(at);
        uint32_t keep = row < rows ? ~0u : 0u;
        ptx::store_shared_v4(at, make_uint4((x.x ^ sign) & keep, (x.y ^ sign) & keep,
                                            (x.z ^ sign) & keep, (x.w ^ sign) & keep));
      }
      ptx::fence_async_shared();
      ptx::barrier_sync(kOwnQueries + warpgroup, 128);
    }

    __device__ __forceinline__ void store(const Work& work, Output& out,
                                          const float (&lse)[2]) const {
      const ForwardParams& forward = params.forward;
      uint32_t staged = address(kOwnOut ? shared.out : shared.q);
      int row = 16 * warp, lane = threadIdx.x % 32;
      int rows = work.coord.rows.length - work.first_row;
      int64_t first = work.coord.rows.begin + work.first_row;
      tile::store_accumulator<E, TileO>(staged, row, out);
      __syncwarp();
      E* out_rows = static_cast<E*>(forward.out.data) +
                    forward.out.stride.offset(work.coord.batch, first, work.coord.head);
      tile::store_rows<TileO, 16, 32>(out_rows, forward.out.stride.row, forward.out.aligned16,
                                      staged, row, rows, forward.shape.headdim_v, lane);
      if (lane % 4 != 0) return;
      float* lse_rows =
          forward.lse.data + forward.lse.offset(work.coord.batch, work.coord.head, first);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int at = row + lane / 4 + 8 * half;
        if (at < rows) lse_rows[at] = lse[half];
      }
    }

    // Adds the NaN and Inf of partial blocks to the outputs of this warp that see them.
    __device__ __forceinline__ void store_specials(const Work& work) const {
      const ForwardParams& forward = params.forward;
      tile::GlobalRows v(forward.v, work.coord.batch, work.k_rows, work.head_k,
                         forward.shape.headdim_v);
      int rows = min(16, work.coord.rows.length - warp_row(work)), cols = v.cols;
      __syncwarp();
#pragma unroll 1
      for (int index = threadIdx.x % 32; index < rows * cols; index += 32) {
        int row = warp_row(work) + index / cols, col = index % cols;
        float sum =
            tile::sum_specials<E>(v, work.mask.visible_keys(row), work.keys, kBlockN, col);
        if (sum == 0.f) continue;
        E* out = static_cast<E*>(forward.out.data) +
                 forward.out.stride.offset(work.coord.batch, work.coord.rows.begin + row,
                                           work.coord.head) +
                 col;
        *out = tile::from_float<E>(tile::to_float(*out) + sum);
      }
    }

    __device__ __forceinline__ void release_queries() const {
      if (!kOwnOut) ptx::fence_async_shared();  // the output was written where Q comes next
      __syncwarp();
      arrive(shared.q_empty);
    }

    __device__ __forceinline__ void consume_tile(const Work& work, Place& place) const {
      int first_row = work.first_row + 64 * warpgroup;
      BlockRange keys = work.mask.key_blocks(first_row, 64, kBlockN);
      keys = {__shfl_sync(~0u, keys.begin, 0), __shfl_sync(~0u, keys.end, 0),
            __shfl_sync(~0u, keys.full_begin, 0), __shfl_sync(~0u, keys.full_end, 0)};
      if (keys.empty()) keys.begin = keys.end = work.keys.end;
      Softmax softmax;
      Output out;
      tile::clear(out);
      skip(work.keys.end - keys.end, place);
      if (!keys.empty()) {
        prepare_queries(work);
        attend(work, keys, place, softmax, out);
      }
      if (kOwnOut) release_queries();
      skip(keys.begin - work.keys.begin, place);
      float lse[2];
      softmax.finish(out, lse);
      if (!kOwnOut) ptx::barrier_sync(kOwnQueries + warpgroup, 128);  // Q is not needed any more
      store(work, out, lse);
      if (!kOwnOut) release_queries();
      if (*static_cast<volatile int*>(&shared.special) != 0) store_specials(work);
    }

    __device__ __forceinline__ void consume() const {
      Place place;
      uint32_t q_parity = 0;
#pragma unroll 1
      for (uint32_t index = blockIdx.x; index < params.schedule.tiles; index += gridDim.x) {
        Work work(params, index);
        if (work.nothing()) continue;
        ptx::mbarrier_wait(address(&shared.q_full), q_parity);
        q_parity ^= 1;
        consume_tile(work, place);
      }
    }
  };

  static __device__ __forceinline__ void run(const ForwardSm90Params& params, Shared& shared) {
    if (threadIdx.x == 0) init(shared);
    __syncthreads();
    if (tile::warp_index() < 4) {
      ptx::decrease_registers<kLoaderRegisters>();
      if (tile::warp_index() > 0) {
        scan(params, shared);
      } else {
        produce(params, shared);
      }
    } else {
      ptx::increase_registers<kRegisters>();
      Consumer(params, shared).consume();
    }
  }
};

template <DType kType, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(ForwardSm90<kType, kHeadDim, kHeadDimV>::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ ForwardSm90Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  using Kernel = ForwardSm90<kType, kHeadDim, kHeadDimV>;
  Kernel::run(params, *reinterpret_cast<typename Kernel::Shared*>(smem));
#else
  __trap();  // the planner takes this kernel on devices that run code for sm_90a only
#endif
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_forward_sm90(const ForwardParams& forward, const ForwardSchedule& schedule, void* stream) {
  using Kernel = ForwardSm90<kType, kHeadDim, kHeadDimV>;
  const ProblemShape& shape = forward.shape;
  auto map = [&shape](const ConstTensor& tensor, const SeqLens& lens, int heads, int columns,
                      int box_rows) {
    return make_tensor_map(tensor.data, lens.packed() ? 1 : shape.batch, heads, lens.rows, columns,
                           tensor.stride.batch, tensor.stride.head, tensor.stride.row, box_rows);
  };
  ForwardSm90Params params{
      map(forward.q, shape.seqlens_q, shape.heads_q, shape.headdim, Kernel::kBlockM),
      map(forward.k, shape.seqlens_k, shape.heads_k, shape.headdim, Kernel::kBlockN),
      map(forward.v, shape.seqlens_k, shape.heads_k, shape.headdim_v, Kernel::kBlockN), forward,
      schedule};
  launch<forward_sm90_kernel<kType, kHeadDim, kHeadDimV>>(
      schedule.ctas, Kernel::kThreads, static_cast<int>(sizeof(typename Kernel::Shared)), stream,
      params);
}

}  // namespace flashattn
