# Read by vLLM's own CMake through CMAKE_PROJECT_vllm_extensions_INCLUDE; acts when all of its targets are defined.
#
#   FLEET_FIRST        sources to compile first, the longest one first; ninja starts what is ready in the file's order
#   FLEET_LEFT_OUT     sources not to compile
#   FLEET_UNDEFINED    words to take out of the compile options with them, so that nothing calls what is left out
#
# A source is named by the end of its path, since its folder moved between versions.

function(fleet_change_sources)
  get_property(targets DIRECTORY "${CMAKE_SOURCE_DIR}" PROPERTY BUILDSYSTEM_TARGETS)
  set(missing ${FLEET_LEFT_OUT})
  foreach(target IN LISTS targets)
    get_target_property(sources ${target} SOURCES)
    if(NOT sources)
      continue()
    endif()
    set(kept ${sources})
    foreach(name IN LISTS FLEET_LEFT_OUT)
      set(found ${kept})
      list(FILTER found INCLUDE REGEX "(^|/)${name}$")
      if(found)
        list(REMOVE_ITEM kept ${found})
        list(REMOVE_ITEM missing ${name})
      endif()
    endforeach()
    if(NOT kept STREQUAL sources)
      get_target_property(options ${target} COMPILE_OPTIONS)
      foreach(word IN LISTS FLEET_UNDEFINED)
        # Inside a generator expression of the language, so it is a text and not an item of the list.
        string(REGEX REPLACE "${word}(;|>|$)" "\\1" options "${options}")
      endforeach()
      set_target_properties(${target} PROPERTIES COMPILE_OPTIONS "${options}")
    endif()
    set(first "")
    foreach(name IN LISTS FLEET_FIRST)
      set(found ${kept})
      list(FILTER found INCLUDE REGEX "(^|/)${name}$")
      list(APPEND first ${found})
    endforeach()
    if(first)
      list(REMOVE_ITEM kept ${first})
    endif()
    set_target_properties(${target} PROPERTIES SOURCES "${first};${kept}")
  endforeach()
  if(missing)
    message(FATAL_ERROR "nothing compiles ${missing}, which is to be left out")
  endif()
endfunction()

cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL fleet_change_sources)
