"""Trains a teacher, distils it into a student, scores the student and predicts one image: no command line.

python examples/train_and_predict.py             # on the embedded digits; about a minute on a CPU
"""

import numpy as np

import drumline

common = ["data.source=digits", "train.epochs=4", "parallel.processes=1"]
teacher = drumline.train(drumline.Recipe.from_args([*common, "model.name=resnet8x4"]))
print(f"teacher: {teacher['top1']:.1%}, in {teacher['run']}")

student = drumline.distill(
    drumline.Recipe.from_args(
        [*common, "model.name=resnet8", f"distill.teacher_weights={teacher['run']}", "distill.method=dkd"]
    )
)
print(f"student: {student['top1']:.1%}; scored again: {drumline.evaluate(student['run'])['top1']:.1%}")

model = drumline.load_model(student["run"])
prediction = model.predict(np.zeros((8, 8), np.uint8))
print(f"a black image is a {prediction.label} ({prediction.probability:.0%})")
