# Labels of tests that a run of CI omits, by patterns of their names. Their other label is the floor.
# .ci/run says which run proves what; CMakePresets.json has the labels that each omits.
set(labels
  # Pure computations of many seconds, which no sanitizer sees into.
  proof "EveryAlgorithm[.]IsVerified|CallsAreProved|IntranodePlan[.]|NoBuiltInScheduleReduces|SlicesOfAnyBoxesAreRefused"
  # Measure processor time, or who gets it.
  timed "ALongWaitUsesNoProcessorTime|DoesNotStarve"
  # Take minutes under a sanitizer, and others do the same with less.
  large "Collectives.NodesOfSeveralRanks$|Algorithms/EveryAverage|TokenizerCharacters|TwoHundredKills|AKillAtAnyCallLeavesAValidBest|EveryStrategyOnOneToFourRanks|ConvolutionsOfLargeSizes|emulated_gpu.*(MissingWait|SymmetricMemoryHasTheBits|TrainingTouchesItsOwnDeviceAlone)"
  # Rows of a table that differ in numbers, not in code: sanitizers have the others, a release build all.
  rows "Ranks/Plan[.].*/[013]$|DeepSpeedOptimizers[.].*/(sgd|adam_l2|adamw_decay_all)$|Ranks/Groups[.].*/[0245]$|Ranks/Conformance[.].*/[02]$|EveryAlgorithmOverSim.GivesExactResultsInLargeGroups|Rows/MeshModels[.].*/(gpt2_dropout|gpt2_untied_lamb|llama_dropout|llama_lora|llama_bf16)$|Rows/MeshFiles[.].*/gpt2$|^host[.]Types/(ImageOps|ElementOps|ShapeOps)[.].*/f16$"
  # The same under the thread sanitizer alone.
  many_turns "comm[.]Explain[.]|ALargeGroupOnANetwork|SomeRanksMayCallInPlace|AFinalStepOfOneOperandDivides|EightMebibytes|AtEveryEdge|SeveralChunks|MoreChunksThanSlots|LargeResults|ASenderRunsAheadByTheFifoDepth|ASplitGroupHasItsOwnNodeMap|NoDeadlockInAnyOrderOfProgress|RandomSequencesOfCalls/[5-8]|InSharedMemory/[5-8]|EveryCountOfSlots/[5-8]|AStoppedRankIsNamedByIndirectWaiters|Ranks/Conformance[.]|PairwiseOrders.OnSimulatedNodes|Sizes/PairwiseOrder[.].*/[13567]$"
  # Differ from others in what the address sanitizer may find, not in what a release build may compute.
  memory "emulated_gpu.(NcclBackend[.]|(PeerCuda|Nccl|Native)/Collectives)"
)
# Tests of more than 20 s, which ctest is to start first: a long one that started last would leave a core idle. Without
# this ctest knows the times of an earlier run, which a new clone has not.
set(long_cost 100)
set(long "(emulated_(training|hybrid|offload|graph_training)|sharding_(mesh_faults|optimizer_training)|comm_soak)_test[.]")
