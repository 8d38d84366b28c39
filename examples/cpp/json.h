// A JSON reader with the features that a Drumline record needs: text, numbers, lists and tables.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct Json {
    enum Kind { Null, Number, Text, List, Table } kind = Null;
    double number = 0;
    std::string text;
    std::vector<Json> list;
    std::map<std::string, Json> table;

    const Json &operator[](const std::string &key) const {
        auto found = table.find(key);
        if (found == table.end()) throw std::runtime_error("the record has no " + key);
        return found->second;
    }

    static Json parse(const std::string &from) {
        const char *at = from.c_str();
        return value(at, 0);
    }

  private:
    static void blank(const char *&at) {
        while (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r') at++;
    }

    static void expect(const char *&at, char sign) {
        blank(at);
        if (*at != sign) throw std::runtime_error(std::string("the record is not JSON: no ") + sign);
        at++;
    }

    // Skips a word if it comes next; returns whether it did.
    static bool word(const char *&at, const char *name) {
        size_t length = std::strlen(name);
        bool here = !std::strncmp(at, name, length);
        if (here) at += length;
        return here;
    }

    static void utf8(std::string &into, uint32_t code) {
        if (code < 0x80) {
            into += static_cast<char>(code);
            return;
        }
        int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
        static const int first[] = {0, 0xC0, 0xE0, 0xF0};
        into += static_cast<char>(first[more] | code >> 6 * more);
        while (more--) into += static_cast<char>(0x80 | ((code >> 6 * more) & 0x3F));
    }

    static uint32_t hex(const char *&at) {
        std::string digits;
        while (digits.size() < 4 && isxdigit(static_cast<unsigned char>(*at))) digits += *at++;
        if (digits.size() < 4) throw std::runtime_error("the record is not JSON: \\u");
        return static_cast<uint32_t>(std::strtoul(digits.c_str(), nullptr, 16));
    }

    static std::string string(const char *&at) {
        std::string found;
        expect(at, '"');
        while (*at && *at != '"') {
            if (*at != '\\') {
                found += *at++;
                continue;
            }
            char sign = at[1];
            at += sign ? 2 : 1;
            if (sign == 'u') {
                uint32_t code = hex(at);
                if (code >= 0xD800 && code < 0xDC00 && at[0] == '\\' && at[1] == 'u') {
                    at += 2;
                    code = 0x10000 + ((code - 0xD800) << 10) + (hex(at) - 0xDC00);
                }
                utf8(found, code);
            } else {
                static const std::string names = "nrtbf", meant = "\n\r\t\b\f";
                auto place = names.find(sign);
                found += place == std::string::npos ? sign : meant[place];
            }
        }
        expect(at, '"');
        return found;
    }

    static Json value(const char *&at, int depth) {
        Json found;
        if (depth > 32) throw std::runtime_error("the record is nested too deeply");
        blank(at);
        if (*at == '"') {
            found.kind = Text;
            found.text = string(at);
        } else if (*at == '[' || *at == '{') {
            found.kind = *at == '[' ? List : Table;
            char end = *at++ == '[' ? ']' : '}';
            for (blank(at); *at != end; blank(at)) {
                if (!found.list.empty() || !found.table.empty()) expect(at, ',');
                if (found.kind == List) {
                    found.list.push_back(value(at, depth + 1));
                } else {
                    blank(at);
                    std::string key = string(at);
                    expect(at, ':');
                    found.table[key] = value(at, depth + 1);
                }
            }
            at++;
        } else if (word(at, "true")) {
            found.kind = Number;
            found.number = 1;
        } else if (word(at, "false")) {
            found.kind = Number;
        } else if (!word(at, "null")) {
            char *end = nullptr;
            found.kind = Number;
            found.number = std::strtod(at, &end);
            if (end == at) throw std::runtime_error("the record is not JSON");
            at = end;
        }
        return found;
    }
};
