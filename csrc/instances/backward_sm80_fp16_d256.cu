#include "kernels/backward_sm80.cuh"

namespace flashattn {

template void run_backward_sm80<DType::kFloat16, 256, 256>(const BackwardParams&, SmemClass, void*);

}  // namespace flashattn
