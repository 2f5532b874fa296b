"""The example of the page about the Python API, without this line."""

import lora_rocm

settings = ["train.max_train_steps=40", "output.name=zibu"]
loaded = lora_rocm.load_recipe("demo.yaml", settings)
print(loaded.recipe.lora.rank)

checked = lora_rocm.check("demo.yaml", settings)
print(checked.error or "ready to train")
planned = lora_rocm.plan("demo.yaml", settings, card="12GB")
print(planned.error or planned.chosen)

run = lora_rocm.start_run("demo.yaml", settings, run_dir="runs/first")
for event in run.follow():
    if isinstance(event, lora_rocm.StepEvent):
        print(event.updates, event.loss)
print(run.result().files)

view = lora_rocm.RunView.of("runs/first")
print(view.state, view.updates, view.losses[-1])
