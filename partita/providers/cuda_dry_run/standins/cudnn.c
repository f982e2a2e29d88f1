/* libcudnn: descriptors that are only passed back, workspaces of no bytes, layers that do nothing. ONNX Runtime opens
   it together with its CUDA provider and looks its functions up by name. Source: cuDNN documentation, 9; the numbers of
   the backend's attributes and types are those that cudnn_frontend passes. */

/* The version that cudnn_frontend in ONNX Runtime 1.31 was compiled with, so that it takes no path for older ones. */
API size_t cudnnGetVersion(void) { return 91400; }
API const char *cudnnGetErrorString(int status) { return status ? "failed (dry run)" : "CUDNN_STATUS_SUCCESS"; }
API void cudnnGetLastErrorString(char *message, size_t size) {
    if (size) message[0] = 0;
}
API int cudnnGetStream(void *handle, void **stream) {
    (void)handle;
    *stream = NULL;
    return 0;
}

API int cudnnCreate(void **made) { return give_handle(made); }
API int cudnnCreateActivationDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateConvolutionDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateDropoutDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateFilterDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateLRNDescriptor(void **made) { return give_handle(made); }
API int cudnnCreatePoolingDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateReduceTensorDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateRNNDataDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateRNNDescriptor(void **made) { return give_handle(made); }
API int cudnnCreateTensorDescriptor(void **made) { return give_handle(made); }

/* ---- sizes ---- */

API int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) {
    (void)handle;
    *bytes = 0;
    return 0;
}
API int cudnnGetReductionIndicesSize(void *handle, void *reduction, void *from, void *to, size_t *bytes) {
    (void)handle, (void)reduction, (void)from, (void)to;
    *bytes = 0;
    return 0;
}
API int cudnnGetReductionWorkspaceSize(void *handle, void *reduction, void *from, void *to, size_t *bytes) {
    (void)handle, (void)reduction, (void)from, (void)to;
    *bytes = 0;
    return 0;
}
API int cudnnGetRNNTempSpaceSizes(
    void *handle, void *layers, int mode, void *data, size_t *workspace_bytes, size_t *reserve_bytes
) {
    (void)handle, (void)layers, (void)mode, (void)data;
    *workspace_bytes = 0;
    if (reserve_bytes) *reserve_bytes = 0; /* may be NULL at inference */
    return 0;
}
API int cudnnGetConvolutionForwardWorkspaceSize(
    void *handle, void *x, void *w, void *convolution, void *y, int algorithm, size_t *bytes
) {
    (void)handle, (void)x, (void)w, (void)convolution, (void)y, (void)algorithm;
    *bytes = 0;
    return 0;
}

/* ---- recurrent weights ---- */

/* Both addresses lie in the weight space the caller gave, which is device memory: copies to it do nothing. */
API int cudnnGetRNNWeightParams(
    void *handle, void *layers, int layer, size_t space_bytes, void *space, int gate, void *matrix,
    void **matrix_address, void *bias, void **bias_address
) {
    (void)handle, (void)layers, (void)layer, (void)space_bytes, (void)gate, (void)matrix, (void)bias;
    *matrix_address = *bias_address = space;
    return 0;
}
API int cudnnGetTensorNdDescriptor(void *tensor, int wanted, int *type, int *rank, int *sizes, int *strides) {
    (void)tensor;
    *type = 0; /* CUDNN_DATA_FLOAT */
    *rank = wanted;
    for (int axis = 0; axis < wanted; axis++) sizes[axis] = strides[axis] = 1;
    return 0;
}

/* ---- convolution ---- */

/* cudnnConvolutionFwdAlgoPerf_t: all zeros is algorithm 0 that succeeds without workspace. */
struct algorithm {
    int algorithm, status;
    float milliseconds;
    size_t workspace_bytes;
    int determinism, math, reserved[3];
};
API int cudnnGetConvolutionForwardAlgorithm_v7(
    void *handle, void *x, void *w, void *convolution, void *y, int wanted, int *found, struct algorithm *results
) {
    (void)handle, (void)x, (void)w, (void)convolution, (void)y;
    *found = wanted > 0;
    if (*found) memset(results, 0, sizeof *results);
    return 0;
}
API int cudnnFindConvolutionForwardAlgorithmEx(
    void *handle, void *x, void *x_data, void *w, void *w_data, void *convolution, void *y, void *y_data, int wanted,
    int *found, struct algorithm *results, void *workspace, size_t workspace_bytes
) {
    (void)x_data, (void)w_data, (void)y_data, (void)workspace, (void)workspace_bytes;
    return cudnnGetConvolutionForwardAlgorithm_v7(handle, x, w, convolution, y, wanted, found, results);
}

/* ---- the backend, on which cudnn_frontend is built ---- */

API int cudnnBackendCreateDescriptor(int type, void **made) { (void)type; return give_handle(made); }

/* One engine answers every question for engines, every number asked for is 0 (engine 0, no workspace, no shared
   memory), and every other list is empty. */
API int cudnnBackendGetAttribute(
    void *descriptor, int attribute, int type, int64_t room, int64_t *count, void *elements
) {
    enum { ENGINE_HEURISTIC_RESULTS = 202, INT64 = 3, INT32 = 23 };
    (void)descriptor;
    int number = type == INT64 || type == INT32;
    if (count) *count = number || attribute == ENGINE_HEURISTIC_RESULTS;
    if (number && room > 0 && elements) memset(elements, 0, type == INT64 ? sizeof(int64_t) : sizeof(int32_t));
    return 0;
}
