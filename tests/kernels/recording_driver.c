// A CUDA driver for machines without a GPU. It loads nothing and runs nothing: it records what Triton's launcher passes to
// cuLaunchKernelEx, with the sizes of the parameters that the cubin itself states, and refuses the tensor maps that
// cuTensorMapEncodeTiled is documented to refuse.
#include <cuda.h>
#include <elf.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  int parameters, offsets[256], sizes[256];
} Function;

typedef struct {
  unsigned grid[3], block[3], shared;
  int parameters, offsets[256], sizes[256];
  unsigned char bytes[8192];
} Launch;

typedef struct {  // what a CUtensorMap holds here: 128 bytes
  uint64_t address, sizes[5], strides[4];
  uint32_t box[5], rank, element;
} Map;

static Launch recorded[256];
static int launches;

int launch_count(void) { return launches; }
const Launch *launch_at(int index) { return &recorded[index]; }

// A cubin states each parameter as EIATTR_KPARAM_INFO: 04 17 0c 00, index, ordinal and offset, size << 18.
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  const Elf64_Ehdr *elf = image;
  const unsigned char *at = image, *end = at + elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
  Function *function = calloc(1, sizeof(Function));
  for (; at + 16 <= end; at++) {
    uint32_t head, words[3];
    memcpy(&head, at, 4);
    memcpy(words, at + 4, 12);
    if (head != 0x000c1704 || words[0] != 0) continue;
    int ordinal = words[1] & 0xffff;
    if (ordinal >= 256) continue;
    function->offsets[ordinal] = words[1] >> 16;
    function->sizes[ordinal] = words[2] >> 18;
    if (ordinal >= function->parameters) function->parameters = ordinal + 1;
  }
  *module = (CUmodule)function;
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction handle, void **parameters, void **extra) {
  const Function *function = (const Function *)handle;
  if (launches == 256 || function->parameters == 0) return CUDA_ERROR_INVALID_VALUE;
  Launch *launch = &recorded[launches++];
  memset(launch, 0, sizeof(Launch));
  launch->grid[0] = config->gridDimX, launch->grid[1] = config->gridDimY, launch->grid[2] = config->gridDimZ;
  launch->block[0] = config->blockDimX, launch->block[1] = config->blockDimY, launch->block[2] = config->blockDimZ;
  launch->shared = config->sharedMemBytes, launch->parameters = function->parameters;
  for (int i = 0; i < function->parameters; i++) {
    launch->offsets[i] = function->offsets[i], launch->sizes[i] = function->sizes[i];
    memcpy(launch->bytes + function->offsets[i], parameters[i], function->sizes[i]);
  }
  return launch->shared > 227 * 1024 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  int element = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  if (type != CU_TENSOR_MAP_DATA_TYPE_FLOAT32 && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 &&
      type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16)
    return CUDA_ERROR_INVALID_VALUE;
  if (rank < 1 || rank > 5 || (uint64_t)address % 16) return CUDA_ERROR_INVALID_VALUE;
  unsigned inner = box[0] * element, widest = 16u << swizzle;
  if (inner % 16 || (swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner > widest)) return CUDA_ERROR_INVALID_VALUE;
  Map *found = (Map *)map;
  memset(map, 0, sizeof(*map));
  found->address = (uint64_t)address, found->rank = rank, found->element = element;
  for (unsigned i = 0; i < rank; i++) {
    if (sizes[i] < 1 || sizes[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || element_strides[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    found->sizes[i] = sizes[i], found->box[i] = box[i];
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
    found->strides[i] = strides[i];
  }
  return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)module;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;  // every address is the device's
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    default: *value = 227 * 1024;
  }
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "refused by the recording driver";
  return CUDA_SUCCESS;
}

static int context;
CUresult cuCtxGetCurrent(CUcontext *found) { return *found = (CUcontext)&context, CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *found, CUdevice device) { return cuCtxGetCurrent(found); }
CUresult cuCtxSetCurrent(CUcontext chosen) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { return *value = 1 << 20, CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return *clusters = 1, CUDA_SUCCESS;
}

