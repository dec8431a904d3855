#include "kernels/forward_sm90.cuh"

namespace flashattn {

template void run_forward_sm90<DType::kBFloat16, 256, 256>(const ForwardParams&,
                                                           const ForwardSchedule&, void*);

}  // namespace flashattn
