# The first lines of a file of tests say where they run, if not as all others do, beside others under both sanitizers
# (programs: in the preset ci alone):
#   // Runs: WORD…
#       ci         also in the preset ci: what depends on optimisation, or takes minutes under a sanitizer
#       pure       not under the thread sanitizer: functions without threads, or arithmetic on threads that others test
#       computes   compiled with optimisation in each build
#       serial     alone on the machine: measures time, or has more ranks than cores
#       alone      each test in a process of its own: it changes its process, or what it starts with; programs' always
#       long       first, since it takes more than 20 s: a long test that started last would leave a core idle
#       operators  (devices) needs the kernels of operators, which the emulated device has in release builds alone
#       host       (devices) also on the host
#   // Not under sanitizers: REGEX…                 of FLOOR.SUITE.TEST: takes minutes there, or measures time; others do
#                                                   the same with less, or it is a pure computation
#   // Not under the thread sanitizer: REGEX…
#   // Needs: TARGET…                               libraries that it links, programs and stubs that it runs
# CMake reads the words when it configures; ctest reads the expressions, and one without a test is a failed test.

# The words behind "// HEADING: " in a source; a heading may stand in several lines.
function(rz_first_lines source heading result)
  set(words "")
  file(STRINGS ${source} lines REGEX "^// ${heading}: ")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^// ${heading}: " "" line "${line}")
    string(REPLACE " " ";" line "${line}")
    list(APPEND words ${line})
  endforeach()
  set(unknown ${words})
  list(REMOVE_ITEM unknown ci pure computes serial alone long operators host)
  if(heading STREQUAL "Runs" AND unknown)
    message(FATAL_ERROR "${source}: // Runs: ${unknown}: tests/first_lines.cmake has the words")
  endif()
  set(${result} "${words}" PARENT_SCOPE)
endfunction()
