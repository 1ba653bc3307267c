# For type checkers and editors in this repository, where triton_kernels/ is not below seqpar/ (see setup.py). Where the
# package is installed, seqpar/triton_kernels/ takes precedence over this file.
from triton_kernels import Config as Config
from triton_kernels import apply_rotary as apply_rotary
from triton_kernels import attention_backward as attention_backward
from triton_kernels import attention_forward as attention_forward
from triton_kernels import delta as delta
from triton_kernels import merge_ as merge_
