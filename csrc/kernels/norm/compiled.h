// The compiled kernels: for each type of x, by the most vectors a thread has of a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/norm/norm.h"

namespace ikbo::norm {

using ForwardKernel = void (*)(NormForward, NormConfig);
using BackwardKernel = void (*)(NormBackward, NormConfig);

template <class T>
ForwardKernel forward_kernel(int kernel_vectors, bool aligned);
template <class T>
BackwardKernel backward_kernel(int kernel_vectors, bool aligned);

template <>
ForwardKernel forward_kernel<__nv_bfloat16>(int kernel_vectors, bool aligned);
template <>
ForwardKernel forward_kernel<__half>(int kernel_vectors, bool aligned);
template <>
ForwardKernel forward_kernel<float>(int kernel_vectors, bool aligned);
template <>
BackwardKernel backward_kernel<__nv_bfloat16>(int kernel_vectors, bool aligned);
template <>
BackwardKernel backward_kernel<__half>(int kernel_vectors, bool aligned);
template <>
BackwardKernel backward_kernel<float>(int kernel_vectors, bool aligned);

}  // namespace ikbo::norm
