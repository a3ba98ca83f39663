#pragma once
/// Where the secret of a job comes from. Ranks of several hosts authenticate each other by it
/// (comm/net/authentication.h).

#include <memory>

#include "comm/net/authentication.h"
#include "comm/os/fd.h"

namespace rz {

/// The secret of this process's job, from the first of these that is set:
///   - RZ_INSECURE=1: none (null), by the user's choice;
///   - RZ_SECRET_FD: a descriptor of secret_descriptor(), which rzrun hands on to its ranks;
///   - RZ_SECRET: a text of at least 32 characters;
///   - RZ_SECRET_FILE: a file whose first line is such a text. It belongs to this user or to root, and others
///     have no access to it;
///   - ringzero/secret in XDG_CONFIG_HOME, else in ~/.config: likewise, of this user alone. If it does not
///     exist, it is created with a random text and mode 0600, also if many processes do so at once. The one
///     that creates it prints a line. Where hosts share their home, their ranks thus have one secret without
///     configuration.
///
/// Errc::config names what is wrong, and the remedies. The secret is in no message.
std::shared_ptr<const net::Secret> process_secret();

/// The variable that decides process_secret(), such as "RZ_SECRET"; empty if none does, and a file has the
/// secret. Errc::config if RZ_INSECURE is neither 0 nor 1.
std::string variable_of_secret();

/// The file that process_secret() would create now; empty if it would create none. Creates nothing.
std::string secret_file_to_create();

/// A sealed memfd that has the secret, closed by exec. A launcher clears FD_CLOEXEC in the child that becomes
/// a rank, and sets RZ_SECRET_FD there to its number.
UniqueFd secret_descriptor(const net::Secret&);

/// Programs that this process starts do not inherit the descriptor of RZ_SECRET_FD.
void keep_secret_descriptor();

}  // namespace rz
