"""What a run writes down.

record         run.json, epochs.jsonl, stages.jsonl (no torch)
phases         where the time went
recorder       keeps run.json true while a run goes on
classes        the names of the classes, beside the model
stage_meter    what a stage used of the machine
predictions    what -e notes of each image
eval_files     predictions.csv and mistakes.jsonl (no torch)
output_writer  all that rank 0 writes: checkpoints, record, TensorBoard events
"""
