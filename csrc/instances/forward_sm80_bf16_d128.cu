#include "kernels/forward_sm80.cuh"

namespace flashattn {

template void run_forward_sm80<DType::kBFloat16, 128, 128>(const ForwardParams&, void*);

}  // namespace flashattn
