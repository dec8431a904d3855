#include "kernels/backward_sm90.cuh"

namespace flashattn {

template void run_backward_sm90<DType::kFloat16, 256, 256>(const BackwardParams&, void*);

}  // namespace flashattn
