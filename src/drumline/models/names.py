"""Model names of torchvision and timm, for suggestions. Neither package needs to be installed."""

from __future__ import annotations

from itertools import product

from drumline.core.suggest import near


def _expand(*patterns: str) -> tuple[str, ...]:
    """Expands `vit_{b,l}_16` to vit_b_16 and vit_l_16."""
    names: list[str] = []
    for pattern in patterns:
        first, *choices = pattern.split("{")
        groups = [choice.split("}") for choice in choices]
        for chosen in product(*(options.split(",") for options, _ in groups)):
            names.append(first + "".join(a + b for a, (_, b) in zip(chosen, groups, strict=True)))
    return tuple(names)


TORCHVISION = _expand(
    "alexnet",
    "convnext_{tiny,small,base,large}",
    "densenet{121,161,169,201}",
    "efficientnet_b{0,1,2,3,4,5,6,7}",
    "efficientnet_v2_{s,m,l}",
    "googlenet",
    "inception_v3",
    "maxvit_t",
    "mnasnet{0_5,0_75,1_0,1_3}",
    "mobilenet_v2",
    "mobilenet_v3_{large,small}",
    "regnet_{x,y}_{400mf,800mf,1_6gf,3_2gf,8gf,16gf,32gf}",
    "resnet{18,34,50,101,152}",
    "resnext50_32x4d",
    "resnext101_{32x8d,64x4d}",
    "shufflenet_v2_x{0_5,1_0,1_5,2_0}",
    "squeezenet1_{0,1}",
    "swin_{t,s,b}",
    "swin_v2_{t,s,b}",
    "vgg{11,13,16,19}",
    "vgg{11,13,16,19}_bn",
    "vit_{b_16,b_32,l_16,l_32,h_14}",
    "wide_resnet{50,101}_2",
)

TIMM = _expand(
    "beit_{base,large}_patch16_224",
    "cait_{xxs24,s24}_224",
    "coatnet_{0,1}_rw_224",
    "convnext_{atto,femto,pico,nano,tiny,small,base,large}",
    "convnextv2_{atto,femto,pico,nano,tiny,base,large}",
    "deit_{tiny,small,base}_patch16_224",
    "deit3_{small,base,large}_patch16_224",
    "densenet{121,161,169,201}",
    "edgenext_{xx_small,x_small,small,base}",
    "efficientnet_b{0,1,2,3,4}",
    "eva02_{tiny,small,base}_patch14_224",
    "fastvit_{t8,t12,s12,sa12}",
    "ghostnet_100",
    "hrnet_w{18,32,48}",
    "inception_{v3,v4}",
    "levit_{128,192,256,384}",
    "maxvit_{tiny,small,base}_tf_224",
    "mixer_b16_224",
    "mobilenetv2_{050,100,140}",
    "mobilenetv3_{large,small}_100",
    "mobilenetv4_conv_{small,medium,large}",
    "mobileone_s{0,1,2,3,4}",
    "mobilevit_{xxs,xs,s}",
    "nf_resnet50",
    "poolformer_{s12,s24}",
    "regnet{x,y}_{002,004,008,016,032,064}",
    "repvgg_{a0,a1,b0,b1}",
    "resnet{18,34,50,101,152}",
    "resnet{18,26,34,50,101}d",
    "resnetv2_{50,101}",
    "resnext50_32x4d",
    "seresnet50",
    "swin_{tiny,small,base,large}_patch4_window7_224",
    "swinv2_{tiny,small,base}_window8_256",
    "tf_efficientnet_b{0,1,2,3,4,5,6,7}",
    "tf_efficientnetv2_{s,m,l}",
    "tiny_vit_{5m,11m,21m}_224",
    "vit_{tiny,small,base,large}_patch16_224",
    "vit_{small,base}_patch32_224",
    "wide_resnet50_2",
    "xception",
)


def suggest(name: str, built_in: tuple[str, ...]) -> tuple[str, ...]:
    """At most three names close to a wrong one: built-in models first, then those of torchvision and timm."""
    bare = name.removeprefix("torchvision/").removeprefix("timm/")
    found = near(bare, built_in, most=3)
    found += [f"torchvision/{known}" for known in near(bare, TORCHVISION, most=3) if known not in built_in]
    found += [
        f"timm/{known}"
        for known in near(bare, TIMM, most=3)
        if known not in built_in and known not in TORCHVISION
    ]
    exact = [candidate for candidate in found if _same(bare, candidate)]
    return tuple((exact or found)[:3])


def _same(name: str, candidate: str) -> bool:
    """Whether both are equal up to punctuation and case."""
    strip = str.maketrans("", "", "-_/. ")
    return name.lower().translate(strip) == candidate.rpartition("/")[2].lower().translate(strip)
