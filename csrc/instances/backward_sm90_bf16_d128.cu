#include "kernels/backward_sm90.cuh"

namespace flashattn {

template void run_backward_sm90<DType::kBFloat16, 128, 128>(const BackwardParams&, void*);

}  // namespace flashattn
