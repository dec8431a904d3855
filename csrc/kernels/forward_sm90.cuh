// Forward for sm_90a: wgmma on tiles that TMA brings. A CTA has one warpgroup that loads and two or
// three that compute, 64 queries each; keys and values pass through rings of shared memory, from
// the last block that a tile sees to the first, and one tile follows the other without a gap.
// docs/forward_sm90.md draws the pipeline.
#pragma once

#include <cfloat>

#include "host/launch.cuh"
#include "kernels/forward_sm90_load.cuh"
#include "kernels/kernels.h"
#include "kernels/tensor_maps.h"
#include "tile/mask_apply.cuh"
#include "tile/reference_softmax.cuh"
#include "tile/rescore.cuh"
#include "tile/special.cuh"
#include "tile/store.cuh"
#include "tile/warpgroup_mma.cuh"

namespace flashattn {

// One of the warpgroups that compute.
template <class Config>
class ForwardSm90Consumer {
  using E = typename Config::E;
  using Shared = typename Config::Shared;
  using Work = ForwardSm90Work;
  using Place = typename Config::Place;
  using QueryPlace = typename Config::QueryPlace;
  using WorkPlace = typename Config::WorkPlace;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kBlockN = Config::kBlockN, kHeadDim = Config::kHeadDim;
  static constexpr int kHeadDimV = Config::kHeadDimV;
  using Scores = tile::Accumulator<16, kBlockN>;
  using Output = tile::Accumulator<16, kHeadDimV>;
  using Packed = tile::PackedAccumulator<16, kBlockN>;
  using Softmax = tile::ReferenceSoftmax<Config::kType>;

 public:
  __device__ __forceinline__ ForwardSm90Consumer(const ForwardSm90Params& params, Shared& shared)
      : params_(params),
        shared_(shared),
        warpgroup_(tile::warp_index() / 4 - 1),
        warp_(tile::warp_index() - 4),
        q_(ptx::wgmma_descriptor(ptx::shared_address(shared.q) + warpgroup_ * 64 * TileQ::kPitch)),
        k_(ptx::wgmma_descriptor(ptx::shared_address(shared.k))),
        v_(ptx::wgmma_descriptor(ptx::shared_address(shared.v), TileV::kSlabBytes)) {}

  __device__ __forceinline__ void run() {
    next_work();
#pragma unroll 1
    while (leading_ != kNone) {
      if (own_.empty()) {
        pass_by();
      } else {
        attend();
      }
    }
  }

 private:
  __device__ __forceinline__ const Work& work() const { return shared_.work[work_place_.slot()]; }
  __device__ __forceinline__ float scale() const {
    // A scale of 0 would make hidden scores NaN: the least normal number instead. The sign of a
    // negative one goes to Q.
    float scale = params_.forward.shape.softmax_scale;
    return scale == 0.f ? FLT_MIN : fabsf(scale);
  }

  // Waits for the work at work_place_.
  __device__ __forceinline__ void next_work() {
    work_place_.wait_full(shared_.work_full);
    const Work& work = this->work();
    const BlockRange& own = work.own[warpgroup_];
    own_ = {__shfl_sync(~0u, own.begin, 0), __shfl_sync(~0u, own.end, 0),
            __shfl_sync(~0u, own.full_begin, 0), __shfl_sync(~0u, own.full_end, 0)};
    leading_ = __shfl_sync(~0u, work.none() ? kNone : work.keys.end - own.end, 0);
    trailing_ = own_.begin - __shfl_sync(~0u, work.keys.begin, 0);
  }

  // Blocks that other warpgroups of the CTA see.
  __device__ __forceinline__ void skip(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks, place_.advance()) {
      place_.wait_full(shared_.k_full);
      place_.release(shared_.k_empty);
      place_.wait_full(shared_.v_full);
      place_.release(shared_.v_empty);
    }
  }

  // Starts S = Q K^T.
  __device__ __forceinline__ void start_scores(Scores& scores) const {
    place_.wait_full(shared_.k_full);
    uint64_t q = ptx::wgmma_advance(q_, q_place_.slot() * TileQ::kBytes);
    uint64_t k = ptx::wgmma_advance(k_, place_.slot() * TileK::kBytes);
    tile::start_abt<E, TileQ, TileK, kHeadDim>(scores, q, k);
  }

  // Starts O += P V.
  __device__ __forceinline__ void start_values(Output& out, const Packed& p, Place place) const {
    place.wait_full(shared_.v_full);
    uint64_t v = ptx::wgmma_advance(v_, place.slot() * TileV::kBytes);
    tile::start_ab<E, TileV>(out, p, v);
  }

  // What the output has to be scaled by once P V of the block before is in it.
  struct Factor {
    float rows[2] = {1.f, 1.f};
    bool used = false;
  };

  template <int NT>
  __device__ __forceinline__ void mask(float (&scores)[1][NT][4], int first_key) const {
    tile::apply_mask<false>(scores, work().mask, work().first_row + 16 * warp_, first_key,
                            -tile::kInfinity);
  }

  // S of a block becomes P, where rows may be masked or may need another reference.
  __device__ __forceinline__ float2 soften_carefully(int block, Softmax& softmax, Scores& scores,
                                                     Factor& factor) const {
    if (own_.partial(block)) mask(scores, block * kBlockN);
    if (!softmax.watching()) {
      return Softmax::exponentiate(scores, softmax.exponents(scale() * tile::kLog2E));
    }
    float highest[2] = {-tile::kInfinity, -tile::kInfinity};
    Softmax::highest_of(scores, highest);
    bool first = block == own_.end - 1, few = first_keys() < Softmax::kFewKeys;
    float room = few && block == own_.end - 2 ? 0.f : Softmax::kRoom;
    factor.used = softmax.raise(highest, room, scale(), factor.rows).any();
    if (first && few) softmax.watch |= Softmax::kUnsettled;
    return Softmax::exponentiate(scores, softmax.careful_exponents(scores, scale()));
  }

  // The keys that the sequence has in the block that this warpgroup sees first, masked ones too.
  __device__ __forceinline__ int first_keys() const {
    return work().k_rows.length - (own_.end - 1) * kBlockN;
  }

  // Scores of 8 keys of a block once more.
  __device__ __forceinline__ void rescore(float (&scores)[1][1][4], int block, int n) const {
    const ForwardParams& forward = params_.forward;
    constexpr int kLoads = Config::kWarpgroups == 2 ? 4 : 1;  // as many as registers allow
    int first_key = block * kBlockN + 8 * n;
    tile::GlobalRows keys(forward.k, work().batch, work().k_rows, work().head_k,
                          forward.shape.headdim);
    tile::rescore<E, TileQ, kHeadDim, kLoads>(
        scores, ptx::shared_address(shared_.q[q_place_.slot()]), 16 * warp_, keys, first_key);
    if (own_.partial(block)) mask(scores, first_key);
  }

  // A row left its room, and its scores are lost: computes them again, twice, as there is no room
  // to keep them beside the other rows' P. From here on the warp watches. `fresh`: sums of P.
  __device__ __forceinline__ void redo(int block, Softmax& softmax, Scores& scores, float2& fresh,
                                       Factor& factor) const {
    // Aside meanwhile, or the compiler takes their registers in every block.
    volatile float sums_before[2] = {softmax.sum[0], softmax.sum[1]};
    volatile float fresh_before[2] = {fresh.x, fresh.y};
    float piece[1][1][4], highest[2] = {-tile::kInfinity, -tile::kInfinity};
#pragma unroll 1
    for (int n = 0; n < kBlockN / 8; ++n) {
      rescore(piece, block, n);
      Softmax::highest_of(piece, highest);
    }
    typename Softmax::Rows moved = softmax.raise(highest, Softmax::kRoom, scale(), factor.rows);
    softmax.watch |= Softmax::kAlarmed;
    factor.used = moved.any();
    float2 sums = make_float2(0.f, 0.f);
#pragma unroll
    for (int n = 0; n < kBlockN / 8; ++n) {
      rescore(piece, block, n);
      float2 sum = Softmax::exponentiate(piece, softmax.careful_exponents(piece, scale()));
      sums = make_float2(sums.x + sum.x, sums.y + sum.y);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[0][n][e] = moved.is[e / 2] ? piece[0][0][e] : scores[0][n][e];
      }
    }
    fresh.x = moved.is[0] ? sums.x : fresh_before[0];
    fresh.y = moved.is[1] ? sums.y : fresh_before[1];
    softmax.sum[0] = sums_before[0] * factor.rows[0];
    softmax.sum[1] = sums_before[1] * factor.rows[1];
  }

  __device__ __forceinline__ void soften(int block, Softmax& softmax, Scores& scores,
                                         Factor& factor) const {
    float2 fresh;
    bool watching = softmax.watching();
    if (own_.partial(block) || watching) {
      fresh = soften_carefully(block, softmax, scores, factor);
    } else {
      fresh = Softmax::exponentiate(scores, softmax.exponents(scale() * tile::kLog2E));
    }
    // The branch depends on all probabilities: without it ptxas moves their computation below
    // the wait for P V, and nothing overlaps.
    if (softmax.left_room(fresh) && !watching) redo(block, softmax, scores, fresh, factor);
    softmax.add(fresh);
  }

  static __device__ __forceinline__ void rescale(Output& out, const Factor& factor) {
#pragma unroll
    for (int n = 0; n < kHeadDimV / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][n][e] *= factor.rows[e / 2];
  }

  // The pass over the blocks of this tile, the last one first, and of the tiles that follow while
  // they can be chained. S of a block is computed beside P V of the block before, and its softmax
  // beside the rest of that. Between tiles, S of the next one is computed while the output of
  // this one is stored.
  __device__ __forceinline__ void attend() {
    Scores scores;
    Packed p;
    Output out;
    Softmax softmax;
    Factor factor;
    Place last;
    tile::clear(out);
    skip(leading_);
    int block = own_.end - 1;
    wait_queries();
    start_scores(scores);
    ptx::wgmma_wait<0>();
    ptx::hold(scores[0]);
#pragma unroll 1
    while (true) {
      place_.release(shared_.k_empty);
      softmax = Softmax();
      factor = Factor();
      soften(block, softmax, scores, factor);
      tile::pack_accumulator<E>(p, scores);
#pragma unroll 1
      while (block > own_.begin) {
        Place before = place_;
        place_.advance();
        --block;
        start_scores(scores);
        start_values(out, p, before);
        ptx::wgmma_wait<1>();
        ptx::hold(scores[0]);
        place_.release(shared_.k_empty);
        factor = Factor();
        soften(block, softmax, scores, factor);
        ptx::wgmma_wait<0>();
        ptx::hold(out[0]);
        before.release(shared_.v_empty);
        if (factor.used) rescale(out, factor);
        tile::pack_accumulator<E>(p, scores);
      }
      last = place_;
      place_.advance();
      close_tile();
      if (!find_chained()) break;
      block = own_.end - 1;
      start_values(out, p, last);
      start_scores(scores);
      release_unread();
      finish_rows(softmax, factor);
      ptx::wgmma_wait<1>();
      finish_tile(out, factor, last);
      tile::clear(out);
      ptx::wgmma_wait<0>();
      ptx::hold(scores[0]);
    }
    start_values(out, p, last);
    finish_rows(softmax, factor);
    ptx::wgmma_wait<0>();
    finish_tile(out, factor, last);
    if (leading_ == kUnknown) {
      skip(trailing_);
      next_work();
    }
  }

  __device__ __forceinline__ void finish_tile(Output& out, const Factor& factor, Place last) const {
    ptx::hold(out[0]);
    last.release(shared_.v_empty);
    rescale(out, factor);
    store(out);
  }

  // Finds the next tile, and whether it can follow while P V of this one's last block is under
  // way. That holds one slot of V: the others must be enough for the blocks that are skipped.
  __device__ __forceinline__ bool find_chained() {
    constexpr int kSkippable = Config::kTile.stages - 1;
    int trailing = trailing_;
    leading_ = kUnknown;
    if (trailing > kSkippable) return false;
    skip(trailing);
    next_work();
    if (leading_ == kNone || own_.empty() || trailing + leading_ > kSkippable) return false;
    skip_leading();
    wait_queries();
    return true;
  }

  // Of a chained tile, whose blocks all fit in the rings.
  __device__ __forceinline__ void skip_leading() {
    const ForwardParams& forward = params_.forward;
    if (Config::kUnread && forward.k.aligned16 && forward.v.aligned16) {
      place_.count += leading_;
    } else {
      skip(leading_);
      leading_ = 0;
    }
  }

  // Releases the blocks that skip_leading() went past without waiting for them. The block of K at
  // place_ is full, and one warp asks for K and V in order: so the slots of those before it have
  // been free since their last use, and this counts as a release after the present one. Without
  // branches: products are under way.
  __device__ __forceinline__ void release_unread() const {
    if constexpr (Config::kUnread) {
#pragma unroll
      for (int i = 1; i < Config::kTile.stages; ++i) {
        Place unread{place_.count - i};
        unread.release(shared_.k_empty, i <= leading_);
        unread.release(shared_.v_empty, i <= leading_);
      }
    }
  }

  __device__ __forceinline__ void wait_queries() const {
    q_place_.wait_full(shared_.q_full);
    prepare_queries();
  }

  // After the last block's softmax.
  __device__ __forceinline__ void close_tile() {
    q_place_.release(shared_.q_empty);
    q_place_.advance();
    work_place_.advance();
  }

  // The tile before the one at work_place_: its work is there until its output is stored.
  __device__ __forceinline__ const Work& ended_work() const {
    return shared_.work[work_place_.before().slot()];
  }

  // Its lse, and what its output is scaled by.
  __device__ __forceinline__ void finish_rows(const Softmax& softmax, Factor& factor) const {
    float lse[2];
    softmax.finish(factor.rows, lse);
    store_lse(ended_work(), lse);
  }

  // Makes Q what the products need: the sign of a negative scale, and zeros in rows that belong
  // to another sequence or to none, whose scores could make the warp watch.
  __device__ __forceinline__ void prepare_queries() const {
    bool negate = params_.forward.shape.softmax_scale < 0.f;
    int rows = work().q_rows.length - work().first_row - 64 * warpgroup_;
    if (!negate && rows >= 64) return;
    uint32_t q = ptx::shared_address(shared_.q[q_place_.slot()]) + warpgroup_ * 64 * TileQ::kPitch;
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
    ptx::named_barrier_sync(Config::kQueriesPrepared + warpgroup_, 128);
  }

  // The rows of this warp in a tile's sequence.
  __device__ __forceinline__ int warp_row(const Work& work) const {
    return work.first_row + 16 * warp_;
  }

  __device__ __forceinline__ E* out_rows(const Work& work) const {
    const MutableTensor& out = params_.forward.out;
    return static_cast<E*>(out.data) +
           out.stride.offset(work.batch, work.q_rows.begin + warp_row(work), work.head);
  }

  __device__ __forceinline__ void store_lse(const Work& work, const float (&lse)[2]) const {
    const RowStats& stats = params_.forward.lse;
    int lane = threadIdx.x % 32, rows = work.q_rows.length - warp_row(work);
    float* to =
        stats.data + stats.offset(work.batch, work.head, work.q_rows.begin + warp_row(work));
    if (lane % 4 == 0 && lane / 4 < rows) to[lane / 4] = lse[0];
    if (lane % 4 == 0 && lane / 4 + 8 < rows) to[lane / 4 + 8] = lse[1];
  }

  // Its output; its work is released.
  __device__ __forceinline__ void store(const Output& out) const {
    const Work& work = ended_work();
    tile::store_accumulator_rows(out_rows(work), params_.forward.out.stride.row,
                                 work.q_rows.length - warp_row(work),
                                 params_.forward.shape.headdim_v, out);
    if (*static_cast<volatile int*>(&shared_.special) != 0) store_specials(work);
    __syncwarp();
    work_place_.before().release(shared_.work_empty);
  }

  // Adds the NaN and Inf of partial blocks to the outputs of this warp that see them.
  __device__ __forceinline__ void store_specials(const Work& work) const {
    const ForwardParams& forward = params_.forward;
    tile::GlobalRows v(forward.v, work.batch, work.k_rows, work.head_k, forward.shape.headdim_v);
    int rows = min(16, work.q_rows.length - warp_row(work)), cols = v.cols;
    __syncwarp();
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < rows * cols; index += 32) {
      int row = index / cols, col = index % cols;
      KeyRange seen = work.mask.visible_keys(warp_row(work) + row);
      float sum = tile::sum_specials<E>(v, seen, work.keys, kBlockN, col);
      if (sum == 0.f) continue;
      E* out = out_rows(work) + row * forward.out.stride.row + col;
      *out = tile::from_float<E>(tile::to_float(*out) + sum);
    }
  }

  // A tile whose rows of this warpgroup see nothing, if there are any.
  __device__ __forceinline__ void pass_by() {
    skip(leading_);
    if (!work().keys.empty()) {
      q_place_.wait_full(shared_.q_full);
      q_place_.release(shared_.q_empty);
      q_place_.advance();
    }
    int rows = min(16, work().q_rows.length - warp_row(work()));
    int cols = params_.forward.shape.headdim_v;
    E* out = out_rows(work());
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < rows * cols; index += 32) {
      out[index / cols * params_.forward.out.stride.row + index % cols] = tile::from_float<E>(0.f);
    }
    store_lse(work(), {-tile::kInfinity, -tile::kInfinity});
    __syncwarp();
    work_place_.release(shared_.work_empty);
    work_place_.advance();
    next_work();
  }

  // In place of leading_: the next work was not asked for; there is none.
  static constexpr int kUnknown = -1, kNone = -2;

  const ForwardSm90Params& params_;
  Shared& shared_;
  int warpgroup_, warp_;  // warp_ of the CTA's computing warps
  uint64_t q_, k_, v_;    // descriptors of the first slots
  Place place_;           // of the next block
  QueryPlace q_place_;    // of the tile at work_place_
  WorkPlace work_place_;
  BlockRange own_;          // blocks that this warpgroup sees
  int leading_, trailing_;  // blocks after and before those that the tile has for others
};

// What each warp of the CTA does.
template <class Config>
__device__ __forceinline__ void forward_sm90(const ForwardSm90Params& params,
                                             typename Config::Shared& shared) {
  if (threadIdx.x == 0) shared.init(4 * Config::kWarpgroups, Config::kHelperWarps);
  __syncthreads();
  if (tile::warp_index() < 4) {
    ptx::decrease_registers<Config::kLoaderRegisters>();
    if (tile::warp_index() == 0) {
      ForwardSm90Producer<Config>(params, shared).run();
    } else if (tile::warp_index() == 1) {
      ForwardSm90Dealer<Config>(params, shared).run();
    } else {
      ForwardSm90Helper<Config>(params.forward, shared).run();
    }
  } else {
    ptx::increase_registers<Config::kRegisters>();
    ForwardSm90Consumer<Config>(params, shared).run();
  }
}

template <DType kType, int kHeadDim, int kHeadDimV>
__global__ void __launch_bounds__(ForwardSm90Config<kType, kHeadDim, kHeadDimV>::kThreads, 1)
    forward_sm90_kernel(const __grid_constant__ ForwardSm90Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t smem[];
  using Config = ForwardSm90Config<kType, kHeadDim, kHeadDimV>;
  forward_sm90<Config>(params, *reinterpret_cast<typename Config::Shared*>(smem));
#else
  __trap();  // the planner takes this kernel on devices that run code for sm_90a only
#endif
}

template <DType kType, int kHeadDim, int kHeadDimV>
void run_forward_sm90(const ForwardParams& forward, const ForwardSchedule& schedule, void* stream) {
  using Config = ForwardSm90Config<kType, kHeadDim, kHeadDimV>;
  const ProblemShape& shape = forward.shape;
  ForwardSm90Params params{
      tensor_map(forward.q, shape.seqlens_q, shape, shape.heads_q, shape.headdim, Config::kBlockM),
      tensor_map(forward.k, shape.seqlens_k, shape, shape.heads_k, shape.headdim, Config::kBlockN),
      tensor_map(forward.v, shape.seqlens_k, shape, shape.heads_k, shape.headdim_v,
                 Config::kBlockN),
      forward, schedule};
  launch<forward_sm90_kernel<kType, kHeadDim, kHeadDimV>>(
      schedule.ctas, Config::kThreads, static_cast<int>(sizeof(typename Config::Shared)), stream,
      params);
}

}  // namespace flashattn
