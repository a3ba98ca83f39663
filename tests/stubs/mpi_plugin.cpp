// Libraries in place of libringzero_mpi.so with another version.
#ifdef RZ_STUB_VERSION
extern "C" const char* rz_mpi_plugin_version() { return RZ_STUB_VERSION; }
#endif
#ifdef RZ_STUB_NEEDS_MPI
extern "C" int rz_absent_mpi();
extern "C" int rz_calls_mpi() { return rz_absent_mpi(); }
#endif
#ifdef RZ_STUB_IS_MPI
extern "C" int rz_absent_mpi() { return 0; }
#endif
