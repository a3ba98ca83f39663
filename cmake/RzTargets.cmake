# Functions that define the libraries (floors) and programs. Sources are globbed: a new file needs no change here.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(PROJECT_IS_TOP_LEVEL)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
  endif()
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
  find_program(CCACHE_PROGRAM ccache)
  if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # A precompiled header defines the same macros in all its users, so ccache may cache them (pch_defines).
    # Depend mode hashes the source files instead of the preprocessed text: a precompiled header identifies
    # its include files by content, so a cached one from before a change of a comment would defeat "#pragma
    # once" and include such a file twice.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_DEPEND=1
        ${CCACHE_PROGRAM})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  endif()
elseif(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES AND NOT CMAKE_CXX_FLAGS MATCHES "-O")
  message(STATUS "ringzero: is built without optimization, since CMAKE_BUILD_TYPE is empty; set it, e.g. to Release")
endif()
# E.g. -O1, which compiles templates of JSON in two thirds of the time of -O3.
set(RZ_COLD_OPTIONS "" CACHE STRING "Compiler options of sharding, tools and bench, in which a run spends little time")
set(RZ_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined")
find_package(Threads REQUIRED)

# Users write <ringzero/comm/communicator.h>, in this build tree as with an installation; public headers name each other by
# relative paths. So no folder of theirs with files of the same names can take the place of ours, and none of ours of theirs.
# Sources of this project name files from its root, and have no include path of a project that contains it.
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/include/ringzero)
foreach(floor comm tensor autograd_lite sharding)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/${floor} ${PROJECT_BINARY_DIR}/include/ringzero/${floor} SYMBOLIC)
endforeach()
set_property(DIRECTORY PROPERTY INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR})

# Flags for all targets of this project, not for targets that link to it.
add_library(rz_flags INTERFACE)
target_compile_options(rz_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-missing-field-initializers>
                       $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
# All code is position-independent, for the MPI plugin. Interposition of symbols is not supported, so calls
# within a library can be direct.
target_compile_options(rz_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-semantic-interposition>)
# A class that one source defines, such as Tape::State, may have fields of types that this source alone knows. In a unity
# build, whose main file is another one, g++ warns of them.
if(CMAKE_UNITY_BUILD)
  target_compile_options(rz_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endif()
# Clang warns of a deprecated function that libstdc++ 12 itself calls, in std::stable_sort.
target_compile_options(rz_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>)
# Pointer checks that the address sanitizer covers too are disabled: they took most of the compile time.
if(RZ_SANITIZE)
  target_compile_options(rz_flags INTERFACE -fsanitize=${RZ_SANITIZE} -fno-omit-frame-pointer -g1
                         -fno-sanitize=null,vptr,object-size,pointer-overflow)
  target_link_options(rz_flags INTERFACE -fsanitize=${RZ_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    # GNU's macros, which Clang has since version 22.
    if(RZ_SANITIZE MATCHES "address")
      # Locals are on the stack, as without a sanitizer: registration tests where memory is.
      target_compile_options(rz_flags INTERFACE -fsanitize-address-use-after-return=never)
      target_compile_definitions(rz_flags INTERFACE __SANITIZE_ADDRESS__=1)
    else()
      target_compile_definitions(rz_flags INTERFACE __SANITIZE_THREAD__=1)
    endif()
  endif()
  if(RZ_SANITIZE MATCHES "undefined")
    # A finding ends the program. Without recovery code compilation takes about half the time.
    target_compile_options(rz_flags INTERFACE -fno-sanitize-recover=undefined)
  endif()
endif()

# rz_floor(name [IN folders…] [EXCEPT folders…]): defines library ringzero_<name>, alias ringzero::<name>, from all
# sources below this folder, those of CUDA if it was found; a new folder needs no change.
function(rz_floor name)
  cmake_parse_arguments(F "" "" "IN;EXCEPT" ${ARGN})
  list(TRANSFORM F_IN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  if(NOT F_IN)
    set(F_IN ${CMAKE_CURRENT_SOURCE_DIR})
  endif()
  set(extensions cpp)
  if(RZ_HAVE_CUDA)
    list(APPEND extensions cu)
  endif()
  foreach(extension ${extensions})
    foreach(folder ${F_IN})
      file(GLOB_RECURSE found CONFIGURE_DEPENDS ${folder}/*.${extension})
      list(APPEND sources ${found})
    endforeach()
    foreach(folder ${F_EXCEPT})
      file(GLOB_RECURSE found ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/*.${extension})
      list(REMOVE_ITEM sources ${found})
    endforeach()
  endforeach()
  add_library(ringzero_${name} ${sources})
  add_library(ringzero::${name} ALIAS ringzero_${name})
  set_target_properties(ringzero_${name} PROPERTIES EXPORT_NAME ${name} VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR})
  # Shared libraries find each other, and the CUDA runtime, in any installation folder.
  set(folders $ORIGIN ${rz_cudart_folder})
  set_target_properties(ringzero_${name} PROPERTIES INSTALL_RPATH "${folders}")
  target_include_directories(ringzero_${name} INTERFACE $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>
                             $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(ringzero_${name} PUBLIC cxx_std_20)
  target_link_libraries(ringzero_${name} PUBLIC Threads::Threads PRIVATE $<BUILD_INTERFACE:rz_flags>)
  set_property(GLOBAL APPEND PROPERTY RZ_FLOORS ringzero_${name})
endfunction()

# rz_leave_out(name file): removes a globbed source file from the library of a floor.
function(rz_leave_out name file)
  get_target_property(sources ringzero_${name} SOURCES)
  list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  set_target_properties(ringzero_${name} PROPERTIES SOURCES "${sources}")
endfunction()

# rz_program(name sources… [LINK targets…]): defines an executable in bin/ and installs it.
function(rz_program name)
  cmake_parse_arguments(P "" "" "LINK" ${ARGN})
  add_executable(${name} ${P_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE ${P_LINK} rz_flags)
  if(RZ_INSTALL)
    install(TARGETS ${name} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
  if(NOT TARGET programs)
    add_custom_target(programs)
  endif()
  add_dependencies(programs ${name})
endfunction()

# rz_of_templates(files…): sources that instantiate the templates of CLI11 or JSON, and whose speed does not
# matter. They are not optimised in the build of CI. Builds that are timed must optimise them, since the linker
# may pick their copy of an inline function for the whole program.
function(rz_of_templates)
  if(CMAKE_UNITY_BUILD AND NOT RZ_COLD_OPTIONS)
    set_source_files_properties(${ARGN} PROPERTIES COMPILE_OPTIONS -O0)
  endif()
endfunction()

# What a build needs, each with its package in Debian. rz_require(PREFIX module package) defines PkgConfig::PREFIX,
# rz_require_package(name package) calls find_package. All that is missing is one error.
include(FindPkgConfig)
macro(rz_require prefix module package)
  pkg_check_modules(${prefix} QUIET IMPORTED_TARGET GLOBAL ${module})
  if(NOT ${prefix}_FOUND)
    list(APPEND rz_missing ${module})
    list(APPEND rz_packages ${package})
  endif()
endmacro()
macro(rz_require_package name package)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    list(APPEND rz_missing ${name})
    list(APPEND rz_packages ${package})
  endif()
endmacro()

rz_require(HWY libhwy libhwy-dev)
rz_require(HWLOC hwloc libhwloc-dev)
rz_require(OPENSSL openssl libssl-dev)
if(NOT RZ_COMM_ONLY)
  rz_require(OPENBLAS openblas libopenblas-pthread-dev)
  rz_require(ONIGURUMA oniguruma libonig-dev)
  rz_require(UTF8PROC libutf8proc libutf8proc-dev)
  rz_require(XXHASH libxxhash libxxhash-dev)
  rz_require_package(nlohmann_json nlohmann-json3-dev)
endif()
if(RZ_PROGRAMS)
  rz_require(YAML yaml-0.1 libyaml-dev)
  rz_require_package(CLI11 libcli11-dev)
endif()
if(RZ_TESTS)
  rz_require_package(GTest libgtest-dev)
endif()
if(rz_missing)
  list(JOIN rz_missing ", " rz_missing)
  list(JOIN rz_packages " " rz_packages)
  # CMake breaks lines that are not indented.
  message(FATAL_ERROR "ringzero needs libraries that pkg-config and CMake do not find:\n  ${rz_missing}\n"
                      "On Debian and Ubuntu:\n  apt-get install ${rz_packages}")
endif()

# Vector targets: AVX-512, AVX2 and portable. With sanitizers AVX2 alone where this machine has it, since a run has one only:
# compiled for such a processor, Highway leaves out the portable one, which takes two thirds of the kernels' compile time.
set(disabled_targets "HWY_SSSE3|HWY_SSE4|HWY_AVX3_DL")
if(RZ_SANITIZE)
  string(APPEND disabled_targets "|HWY_AVX3")
  include(CheckCXXSourceRuns)
  string(CONCAT source "int main() { return !(__builtin_cpu_supports(\"avx2\") && __builtin_cpu_supports(\"fma\") && "
                "__builtin_cpu_supports(\"aes\")); }")
  check_cxx_source_runs("${source}" RZ_HAVE_AVX2)
  if(RZ_HAVE_AVX2)
    target_compile_options(PkgConfig::HWY INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-march=haswell;-maes;-ffp-contract=off>")
  endif()
endif()
target_compile_definitions(PkgConfig::HWY INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:HWY_DISABLED_TARGETS=(${disabled_targets})>")
