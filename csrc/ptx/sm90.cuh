// Instructions of sm_90a, one a function. Sections refer to the PTX ISA manual.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashattn::ptx {

// PTX ISA: Parallel Synchronization, mbarrier. `barrier` is an address in shared memory.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival for the warp, which is converged; takes no register for the lane's number.
__device__ __forceinline__ void mbarrier_arrive_elect(uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "@elected mbarrier.arrive.shared::cta.b64 _, [%0];\n}\n" ::"r"(barrier)
      : "memory");
}

// Arrives, and makes the phase wait for `bytes` more of copies.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity is complete. The loop is hidden from the compiler's front
// end, which would take the warp for divergent behind it.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// A box of a tensor into shared memory; columns and rows past its end are zeros. PTX ISA: Data
// Movement, cp.async.bulk.tensor.
__device__ __forceinline__ void tma_load_4d(uint32_t shared, const void* tensor_map,
                                            uint32_t barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared),
      "l"(tensor_map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// `bytes` side by side, a multiple of 16 as both addresses are. PTX ISA: cp.async.bulk.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Orders this thread's accesses to shared memory before later ones of tensor cores and copies.
// PTX ISA: Memory Consistency Model, proxies.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A fragment's registers to four 8x8 matrices, each transposed. PTX ISA: stmatrix.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

// Of two pairs of 16-bit elements the greater magnitudes: NaN where one is, with signs that mean
// nothing. PTX ISA: max, xorsign.abs.
template <class Element>
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t max_magnitudes<__nv_bfloat16>(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}
template <>
__device__ __forceinline__ uint32_t max_magnitudes<__half>(uint32_t a, uint32_t b) {
  uint32_t max;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(max) : "r"(a), "r"(b));
  return max;
}

// The registers of each thread of a warpgroup. PTX ISA: Miscellaneous, setmaxnreg.
template <int kRegisters>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// PTX ISA: Asynchronous Warpgroup Level Matrix Instructions.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The compiler may not move uses of the values across this point: after a wait, before what comes.
template <int N>
__device__ __forceinline__ void hold(float (&values)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    asm volatile(""
                 : "+f"(values[i][0]), "+f"(values[i][1]), "+f"(values[i][2]), "+f"(values[i][3]));
  }
}

// Where a tile in shared memory lies: 128-byte swizzle, groups of 8 rows 1024 bytes apart.
// `slab_bytes`: from one slab of 64 columns to the next, read for a transposed operand alone. PTX
// ISA: wgmma, matrix descriptor.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, int slab_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupBytes = 1024;
  return kSwizzle128 | (kGroupBytes >> 4) << 32 | static_cast<uint64_t>(slab_bytes >> 4) << 16 |
         (shared & 0x3ffff) >> 4;
}

// The same `bytes` further on.
__device__ __forceinline__ uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  return descriptor + (bytes >> 4);
}

// wgmma.mma_async m64nNk16, accumulators in fp32:
// ss: c (+)= A B^T, A [64][k] and B [N][k] in shared memory; kRowsOfK: c (+)= A B, B [k][N].
// rs: c += A B, A in registers, B [k][N] in shared memory.
template <class Element, int N>
struct Wgmma;

// Operand lists are spelt out by decades: FLASHATTN_REGS10(3) is "%30, ..., %39".
#define FLASHATTN_REGS2(d) "%" #d "0, %" #d "1"
#define FLASHATTN_REGS4(d) FLASHATTN_REGS2(d) ", %" #d "2, %" #d "3"
#define FLASHATTN_REGS6(d) FLASHATTN_REGS4(d) ", %" #d "4, %" #d "5"
#define FLASHATTN_REGS8(d) FLASHATTN_REGS6(d) ", %" #d "6, %" #d "7"
#define FLASHATTN_REGS10(d) FLASHATTN_REGS8(d) ", %" #d "8, %" #d "9"
#define FLASHATTN_ACC(i) "+f"(c[(i) / 4][(i) % 4])
#define FLASHATTN_ACC2(d) FLASHATTN_ACC(d##0), FLASHATTN_ACC(d##1)
#define FLASHATTN_ACC4(d) FLASHATTN_ACC2(d), FLASHATTN_ACC(d##2), FLASHATTN_ACC(d##3)
#define FLASHATTN_ACC6(d) FLASHATTN_ACC4(d), FLASHATTN_ACC(d##4), FLASHATTN_ACC(d##5)
#define FLASHATTN_ACC8(d) FLASHATTN_ACC6(d), FLASHATTN_ACC(d##6), FLASHATTN_ACC(d##7)
#define FLASHATTN_ACC10(d) FLASHATTN_ACC8(d), FLASHATTN_ACC(d##8), FLASHATTN_ACC(d##9)
#define FLASHATTN_REGS30 FLASHATTN_REGS10() ", " FLASHATTN_REGS10(1) ", " FLASHATTN_REGS10(2)
#define FLASHATTN_ACC30 FLASHATTN_ACC10(), FLASHATTN_ACC10(1), FLASHATTN_ACC10(2)
#define FLASHATTN_REGS60 \
  FLASHATTN_REGS30 ", " FLASHATTN_REGS10(3) ", " FLASHATTN_REGS10(4) ", " FLASHATTN_REGS10(5)
#define FLASHATTN_ACC60 FLASHATTN_ACC30, FLASHATTN_ACC10(3), FLASHATTN_ACC10(4), FLASHATTN_ACC10(5)
#define FLASHATTN_REGS90 \
  FLASHATTN_REGS60 ", " FLASHATTN_REGS10(6) ", " FLASHATTN_REGS10(7) ", " FLASHATTN_REGS10(8)
#define FLASHATTN_ACC90 FLASHATTN_ACC60, FLASHATTN_ACC10(6), FLASHATTN_ACC10(7), FLASHATTN_ACC10(8)
#define FLASHATTN_REGS120 \
  FLASHATTN_REGS90 ", " FLASHATTN_REGS10(9) ", " FLASHATTN_REGS10(10) ", " FLASHATTN_REGS10(11)
#define FLASHATTN_ACC120 \
  FLASHATTN_ACC90, FLASHATTN_ACC10(9), FLASHATTN_ACC10(10), FLASHATTN_ACC10(11)

// i0 to i4: the numbers of the operands behind the accumulators.
#define FLASHATTN_WGMMA(Element, type, N, regs, i0, i1, i2, i3, i4, ...)                     \
  template <>                                                                                \
  struct Wgmma<Element, N> {                                                                 \
    template <bool kRowsOfK = false>                                                         \
    static __device__ __forceinline__ void ss(float (&c)[N / 8][4], uint64_t a, uint64_t b,  \
                                              int accumulate) {                              \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                  \
                   ", 0;\n"                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" regs \
                   "}, %" #i0 ", %" #i1 ", p, 1, 1, 0, %" #i3 ";\n}\n"                       \
                   : __VA_ARGS__                                                             \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kRowsOfK ? 1 : 0));                \
    }                                                                                        \
    static __device__ __forceinline__ void rs(float (&c)[N / 8][4], const uint32_t (&a)[4],  \
                                              uint64_t b) {                                  \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" regs \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 1, 1, 1, 1;\n"    \
                   : __VA_ARGS__                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                    \
    }                                                                                        \
  };
#define FLASHATTN_WGMMA_TYPES(...)            \
  FLASHATTN_WGMMA(__half, "f16", __VA_ARGS__) \
  FLASHATTN_WGMMA(__nv_bfloat16, "bf16", __VA_ARGS__)

FLASHATTN_WGMMA_TYPES(32, FLASHATTN_REGS10() ", " FLASHATTN_REGS6(1), 16, 17, 18, 19, 20,
                      FLASHATTN_ACC10(), FLASHATTN_ACC6(1))
FLASHATTN_WGMMA_TYPES(64, FLASHATTN_REGS30 ", " FLASHATTN_REGS2(3), 32, 33, 34, 35, 36,
                      FLASHATTN_ACC30, FLASHATTN_ACC2(3))
FLASHATTN_WGMMA_TYPES(80, FLASHATTN_REGS30 ", " FLASHATTN_REGS10(3), 40, 41, 42, 43, 44,
                      FLASHATTN_ACC30, FLASHATTN_ACC10(3))
FLASHATTN_WGMMA_TYPES(96, FLASHATTN_REGS30 ", " FLASHATTN_REGS10(3) ", " FLASHATTN_REGS8(4), 48, 49,
                      50, 51, 52, FLASHATTN_ACC30, FLASHATTN_ACC10(3), FLASHATTN_ACC8(4))
FLASHATTN_WGMMA_TYPES(128, FLASHATTN_REGS60 ", " FLASHATTN_REGS4(6), 64, 65, 66, 67, 68,
                      FLASHATTN_ACC60, FLASHATTN_ACC4(6))
FLASHATTN_WGMMA_TYPES(192, FLASHATTN_REGS90 ", " FLASHATTN_REGS6(9), 96, 97, 98, 99, 100,
                      FLASHATTN_ACC90, FLASHATTN_ACC6(9))
FLASHATTN_WGMMA_TYPES(256, FLASHATTN_REGS120 ", " FLASHATTN_REGS8(12), 128, 129, 130, 131, 132,
                      FLASHATTN_ACC120, FLASHATTN_ACC8(12))

}  // namespace flashattn::ptx
