#include "kernels/backward_sm80.cuh"

namespace flashattn {

template void run_backward_sm80<DType::kFloat16, 192, 192>(const BackwardParams&, SmemClass, void*);

}  // namespace flashattn
