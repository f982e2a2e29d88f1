/* libcufft: plans that need no workspace and transforms that do nothing. Source: cuFFT documentation, 13.0. */

API int cufftCreate(int *plan) {
    static atomic_int next = 1; /* cufftHandle is an int */
    *plan = atomic_fetch_add(&next, 1);
    return 0;
}

API int cufftXtMakePlanMany(
    int plan, int rank, long long *n, long long *inembed, long long istride, long long idist, int itype,
    long long *onembed, long long ostride, long long odist, int otype, long long batch, size_t *workspace_bytes,
    int etype
) {
    (void)plan, (void)rank, (void)n, (void)inembed, (void)istride, (void)idist, (void)itype, (void)onembed;
    (void)ostride, (void)odist, (void)otype, (void)batch, (void)etype;
    *workspace_bytes = 0;
    return 0;
}
