/* Stand-in for CuTeDSL's CUDA runtime shim: the functions that compiled host code calls.
 *
 * A launch is handed to a registered callback; everything else answers as a B200 without touching a device. A
 * device attribute that is not listed ends the process, so that no made-up number goes unnoticed.
 */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } extent;
typedef struct { int id; int padding; unsigned value[16]; } attribute;
typedef struct { extent grid, block; size_t shared_bytes; void *stream; attribute *attributes; unsigned count; } config;
typedef struct { char *name; } kernel;
typedef int (*callback)(const char *name, const config *launch, void **parameters);

static callback on_launch;

void emulator_on_launch(callback function) { on_launch = function; }

int _cudaLibraryLoadData(void **library, const void *image, void *a, void *b, unsigned n, void *c, void *d, unsigned m) {
    (void)a; (void)b; (void)n; (void)c; (void)d; (void)m;
    *library = (void *)image;
    return 0;
}

int _cudaLibraryUnload(void *library) { (void)library; return 0; }

int _cudaLibraryGetKernel(void **out, void *library, const char *name) {
    (void)library;
    kernel *made = malloc(sizeof *made);
    made->name = strdup(name);
    *out = made;
    return 0;
}

int _cudaKernelSetAttributeForDevice(void *k, int attribute_id, int value, int device) {
    (void)k; (void)attribute_id; (void)value; (void)device;
    return 0;
}

int _cudaFuncSetAttribute(void *k, int attribute_id, int value) {
    (void)k; (void)attribute_id; (void)value;
    return 0;
}

int _cuKernelGetAttribute(int *out, int attribute_id, void *k, int device) {
    (void)attribute_id; (void)k; (void)device;
    *out = 0; /* no static shared or local memory is counted on the host */
    return 0;
}

int _cudaDeviceGetAttribute(int *out, int attribute_id, int device) {
    (void)device;
    switch (attribute_id) {
    case 8: *out = 49152; return 0;    /* shared memory per block without opting in */
    case 16: *out = 148; return 0;     /* SMs */
    case 75: *out = 10; return 0;      /* compute capability */
    case 76: *out = 0; return 0;
    case 81: *out = 233472; return 0;  /* shared memory per SM */
    case 97: *out = 232448; return 0;  /* shared memory per block */
    default:
        fprintf(stderr, "emulator: device attribute %d is not modelled\n", attribute_id);
        abort();
    }
}

int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { (void)device; return 0; }
int _cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int _cudaDeviceSynchronize(void) { return 0; }

int _cudaLaunchKernelEx(const config *launch, void *k, void **parameters) {
    return on_launch ? on_launch(((kernel *)k)->name, launch, parameters) : 999;
}

void cuda_dialect_assert_success(int error) {
    if (error) { fprintf(stderr, "emulator: error %d in host code\n", error); abort(); }
}
void cuda_dialect_print_on_error(int error) {
    if (error) fprintf(stderr, "emulator: error %d in host code\n", error);
}
const char *cuda_dialect_get_error_name(int error) { (void)error; return "error in the emulator"; }
int cuda_dialect_init_library_once(void *once, void *a, void *b, void *c) {
    (void)once; (void)a; (void)b; (void)c;
    return 0;
}
int cuda_dialect_unload_library_once(void *once) { (void)once; return 0; }
