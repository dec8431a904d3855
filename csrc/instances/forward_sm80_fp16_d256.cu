#include "kernels/forward_sm80.cuh"

namespace flashattn {

template void run_forward_sm80<DType::kFloat16, 256, 256>(const ForwardParams&, void*);

}  // namespace flashattn
