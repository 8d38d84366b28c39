// classify MODEL.pt2 IMAGE.jpg...
//
// Prints the class of each JPEG and its probability, using a file that `drumline export --format aoti` wrote. Class
// names and preprocessing come from the record in the file; pixels are those of `drumline predict`.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>

#include "json.h"

extern "C" {
#include "drumline.h"
}

// The preprocessing of an evaluation.
struct Preprocessing {
    int size, filter;
    bool pillow13, crop, turn;
    double eval_crop;

    explicit Preprocessing(const Json &model) {
        size = static_cast<int>(model["size"].number);
        eval_crop = model["eval_crop"].number;
        pillow13 = model["resize"].text == "pillow13";
        crop = model["fit"].text == "crop";
        turn = model["exif"].text == "apply";
        const std::map<std::string, int> filters = {
            {"box", BOX}, {"bilinear", BILINEAR}, {"bicubic", BICUBIC}, {"lanczos", LANCZOS}};
        filter = filters.at(model["interpolation"].text);
    }

    // The whole image, resized to a short side of size / eval_crop, then centre-cropped.
    std::vector<int32_t> geometry(int32_t wide, int32_t high) const {
        int64_t width = size, height = size;
        if (crop) {
            int64_t side = static_cast<int64_t>(std::floor(size / eval_crop));
            width = wide <= high ? side : side * wide / high;
            height = wide <= high ? side * high / wide : side;
        }
        auto centre = [this](int64_t side) { return static_cast<int32_t>(std::nearbyint((side - size) / 2.0)); };
        return {0, 0, wide, high, static_cast<int32_t>(width), static_cast<int32_t>(height), centre(width),
                centre(height), 0};
    }

    // The pixels of a JPEG: uint8, (1, size, size, 3).
    at::Tensor pixels(const std::string &path) const {
        std::ifstream file(path, std::ios::binary);
        std::vector<uint8_t> data{std::istreambuf_iterator<char>(file), {}};
        if (!file) throw std::runtime_error("cannot be read");
        int32_t stored[STORED];
        if (!jpeg_size(data.data(), data.size(), stored)) throw std::runtime_error("is not a JPEG that this program can read");
        if (turn && stored[2]) throw std::runtime_error("may need an EXIF rotation, which this program does not support");
        auto pixels = at::empty({1, size, size, 3}, at::kByte);
        Scratch scratch = {};
        int status = jpeg_window(data.data(), data.size(), stored[0], stored[1], geometry(stored[0], stored[1]).data(),
                                 size, filter, pillow13, pixels.data_ptr<uint8_t>(), &scratch);
        scratch_free(&scratch);
        if (status != DONE) throw std::runtime_error("is an unusual or damaged JPEG; use drumline predict");
        return pixels;
    }
};

int main(int count, char **arguments) {
    if (count < 3) {
        std::cerr << "usage: classify MODEL.pt2 IMAGE.jpg...\n";
        return 2;
    }
    int failed = 0;
    try {
        // By default, AOTInductor does not check the shape of its input, and returns wrong results for a wrong one.
        setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);
        c10::InferenceMode inference;
        torch::inductor::AOTIModelPackageLoader loader(arguments[1]);
        auto metadata = loader.get_metadata();
        if (!metadata.count("drumline")) throw std::runtime_error("has no Drumline record");
        const Json record = Json::parse(metadata["drumline"]);
        const Json &model = record["model"];
        if (record["export"]["takes"].text != "pixels") throw std::runtime_error("was exported with --raw");
        const at::Device device(record["export"]["device"].text); // the one for which the model was compiled
        const Preprocessing preprocessing(model);
        for (int i = 2; i < count; i++) {
            try {
                at::Tensor best, index;
                std::tie(best, index) = loader.run({preprocessing.pixels(arguments[i]).to(device)})[0].max(1);
                size_t number = static_cast<size_t>(index.item<int64_t>());
                const auto &classes = model["classes"].list; // a number if the classes have no names
                std::string label = number < classes.size() ? classes[number].text : std::to_string(number);
                std::printf("%s\t%s\t%.6f\n", arguments[i], label.c_str(), best.item<float>());
            } catch (const std::exception &error) {
                std::cerr << arguments[i] << ": " << error.what() << "\n";
                failed = 1;
            }
        }
    } catch (const std::exception &error) {
        std::cerr << arguments[1] << ": " << error.what() << "\n";
        return 2;
    }
    return failed;
}
