// The loading side of the sm_90a forward: who brings tiles to shared memory.
#pragma once

#include "kernels/forward_sm90_work.cuh"
#include "tile/copy.cuh"
#include "tile/special.cuh"
#include "tile/tma.cuh"

namespace flashattn {

// One thread starts the copy of a tile.
template <class Tile>
__device__ __forceinline__ void forward_sm90_load(const CUtensorMap& map, const uint8_t* tile,
                                                  uint64_t& full, int row, int head, int batch) {
  if (threadIdx.x % 32 != 0) return;
  ptx::mbarrier_arrive_expect(ptx::shared_address(&full), Tile::kBytes);
  tile::start_load<Tile>(&map, ptx::shared_address(tile), ptx::shared_address(&full), row, head,
                         batch);
}

// One warp: computes the tiles' work ahead of all others.
template <class Config>
class ForwardSm90Dealer {
  using Shared = typename Config::Shared;

 public:
  __device__ __forceinline__ ForwardSm90Dealer(const ForwardSm90Params& params, Shared& shared)
      : shared_(shared), cursor_(params) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (typename Config::WorkPlace at;; at.advance()) {
      at.wait_empty(shared_.work_empty);
      ForwardSm90Work& work = shared_.work[at.slot()];
      cursor_.next(work);
      at.release(shared_.work_full);
      if (work.none()) return;
    }
  }

 private:
  Shared& shared_;
  ForwardSm90Cursor<Config::kBlockM, Config::kBlockN> cursor_;
};

// One warp: starts the copies by TMA.
template <class Config>
class ForwardSm90Producer {
  using Shared = typename Config::Shared;
  using Work = ForwardSm90Work;
  using Place = typename Config::Place;
  using QueryPlace = typename Config::QueryPlace;
  using WorkPlace = typename Config::WorkPlace;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kBlockN = Config::kBlockN;

 public:
  __device__ __forceinline__ ForwardSm90Producer(const ForwardSm90Params& params, Shared& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (WorkPlace at;; at.advance()) {
      at.wait_full(shared_.work_full);
      const Work& work = shared_.work[at.slot()];
      if (work.none()) return;
      if (!work.keys.empty()) load(work);
      __syncwarp();
      at.release(shared_.work_empty);
    }
  }

 private:
  // A second buffer of Q is empty by the time that the loads of the tile before are under way. A
  // single one is not, and must not keep K waiting.
  static constexpr bool kQueriesFirst = Config::kTile.query_stages > 1;

  __device__ __forceinline__ void load(const Work& work) {
    BlockRange keys = work.keys;
    int k_row = static_cast<int>(work.k_rows.begin), head = work.head_k;
    int k_batch = batch(params_.forward.shape.seqlens_k, work);
    if (kQueriesFirst) load_queries(work);
#pragma unroll 1
    for (int block = keys.end - 1; block >= keys.begin; --block, place_.advance()) {
      int slot = place_.slot(), row = k_row + block * kBlockN;
      if (params_.forward.k.aligned16) {
        place_.wait_empty(shared_.k_empty);
        forward_sm90_load<TileK>(params_.k, shared_.k[slot], shared_.k_full[slot], row, head,
                                 k_batch);
      }
      if (!kQueriesFirst && block == keys.end - 1) load_queries(work);
      if (params_.forward.v.aligned16) {
        place_.wait_empty(shared_.v_empty);
        uint64_t& full = keys.partial(block) ? shared_.v_landed[slot] : shared_.v_full[slot];
        forward_sm90_load<TileV>(params_.v, shared_.v[slot], full, row, head, k_batch);
      }
    }
  }

  // Packed tensors are one batch, in which a sequence starts at a row.
  static __device__ __forceinline__ int batch(const SeqLens& lens, const Work& work) {
    return lens.packed() ? 0 : static_cast<int>(work.batch);
  }

  __device__ __forceinline__ void load_queries(const Work& work) {
    if (!params_.forward.q.aligned16) return;
    q_place_.wait_empty(shared_.q_empty);
    forward_sm90_load<TileQ>(params_.q, shared_.q[q_place_.slot()], shared_.q_full[q_place_.slot()],
                             static_cast<int>(work.q_rows.begin) + work.first_row, work.head,
                             batch(params_.forward.shape.seqlens_q, work));
    q_place_.advance();
  }

  const ForwardSm90Params& params_;
  Shared& shared_;
  Place place_;
  QueryPlace q_place_;
};

// Config::kHelperWarps warps: copy what TMA can't reach, element by element, and take the NaN and
// Inf out of partial blocks of V (see tile/special.cuh).
template <class Config>
class ForwardSm90Helper {
  using Shared = typename Config::Shared;
  using Work = ForwardSm90Work;
  using Place = typename Config::Place;
  using QueryPlace = typename Config::QueryPlace;
  using WorkPlace = typename Config::WorkPlace;
  using TileQ = typename Config::TileQ;
  using TileK = typename Config::TileK;
  using TileV = typename Config::TileV;
  static constexpr int kBlockN = Config::kBlockN;

 public:
  __device__ __forceinline__ ForwardSm90Helper(const ForwardParams& params, Shared& shared)
      : params_(params), shared_(shared) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (WorkPlace at;; at.advance()) {
      at.wait_full(shared_.work_full);
      const Work& work = shared_.work[at.slot()];
      if (work.none()) return;
      help(work);
      __syncwarp();
      at.release(shared_.work_empty);
    }
  }

 private:
  static constexpr int kThreadsHere = 32 * Config::kHelperWarps;

  static __device__ __forceinline__ int thread() {
    return threadIdx.x % 128 - (128 - kThreadsHere);
  }

  __device__ __forceinline__ void help(const Work& work) {
    const BlockRange& keys = work.keys;  // read again in each step: registers are few
    if (!params_.q.aligned16 && !keys.empty()) {
      q_place_.wait_empty(shared_.q_empty);
      copy<TileQ>(shared_.q[q_place_.slot()], params_.q, work.batch, work.q_rows, work.head,
                  params_.shape.headdim, work.first_row);
      publish(shared_.q_full[q_place_.slot()]);
      q_place_.advance();
    }
#pragma unroll 1
    for (int block = keys.end - 1; block >= keys.begin; --block, place_.advance()) {
      if (!params_.k.aligned16) {
        place_.wait_empty(shared_.k_empty);
        copy<TileK>(shared_.k[place_.slot()], params_.k, work.batch, work.k_rows, work.head_k,
                    params_.shape.headdim, block * kBlockN);
        publish(shared_.k_full[place_.slot()]);
      }
      values(work, block, keys.partial(block));
    }
  }

  __device__ __forceinline__ void values(const Work& work, int block, bool partial) {
    int slot = place_.slot();
    if (!params_.v.aligned16) {
      place_.wait_empty(shared_.v_empty);
      copy<TileV>(shared_.v[slot], params_.v, work.batch, work.k_rows, work.head_k,
                  params_.shape.headdim_v, block * kBlockN);
      ptx::named_barrier_sync(Config::kHelped, kThreadsHere);
    } else if (partial) {
      ptx::mbarrier_wait(ptx::shared_address(&shared_.v_landed[slot]),
                         landed_parities_ >> slot & 1);
      landed_parities_ ^= 1u << slot;
    } else {
      return;
    }
    int rows = work.k_rows.length - block * kBlockN;
    bool special =
        partial && tile::zero_specials_below<typename Config::E, TileV>(
                       ptx::shared_address(shared_.v[slot]), rows, thread(), kThreadsHere);
    publish(shared_.v_full[slot], special);
  }

  template <class Tile>
  __device__ __forceinline__ void copy(const uint8_t* tile, const ConstTensor& tensor,
                                       int64_t batch, SeqRows rows, int head, int headdim,
                                       int first_row) const {
    tile::load_tile_pairs<Tile>(ptx::shared_address(tile),
                                tile::GlobalRows(tensor, batch, rows, head, headdim), first_row,
                                thread(), kThreadsHere);
  }

  // What all helpers wrote is there for the tensor cores. `special`: this one found a NaN or Inf.
  __device__ __forceinline__ void publish(uint64_t& full, bool special = false) const {
    ptx::fence_async_shared();
    bool any = ptx::named_barrier_or(Config::kHelped, kThreadsHere, special);
    if (thread() != 0) return;
    if (any) shared_.special = 1;
    ptx::mbarrier_arrive(ptx::shared_address(&full));
  }

  const ForwardParams& params_;
  Shared& shared_;
  Place place_;
  QueryPlace q_place_;
  uint32_t landed_parities_ = 0;  // a bit a slot
};

}  // namespace flashattn
