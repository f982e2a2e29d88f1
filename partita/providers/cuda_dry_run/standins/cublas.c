/* libcublas: handles that are only passed back; no arithmetic. Source: cuBLAS Library documentation, 13.0. */

API int cublasCreate_v2(void **handle) { return give_handle(handle); }
API int cublasGetMathMode(void *handle, int *mode) {
    (void)handle;
    *mode = 0; /* CUBLAS_DEFAULT_MATH */
    return 0;
}
API const char *cublasGetStatusName(int status) { return status ? "CUBLAS_STATUS (dry run)" : "CUBLAS_STATUS_SUCCESS"; }
API const char *cublasGetStatusString(int status) { return status ? "failed (dry run)" : "success"; }
