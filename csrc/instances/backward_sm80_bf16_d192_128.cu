#include "kernels/backward_sm80.cuh"

namespace flashattn {

template void run_backward_sm80<DType::kBFloat16, 192, 128>(const BackwardParams&, SmemClass,
                                                            void*);

}  // namespace flashattn
