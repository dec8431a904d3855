#include "kernels/backward_postprocess.cuh"
#include "kernels/backward_preprocess.cuh"

namespace flashattn {

template void run_backward_preprocess<DType::kFloat16>(const BackwardParams&, void*);
template void run_backward_preprocess<DType::kBFloat16>(const BackwardParams&, void*);

template void run_backward_postprocess<DType::kFloat16>(const BackwardParams&, int, void*);
template void run_backward_postprocess<DType::kBFloat16>(const BackwardParams&, int, void*);

}  // namespace flashattn
