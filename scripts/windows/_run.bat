@echo off
rem The other files here end in this one: without "call", which would read percent signs and carets in paths again.
rem LR_FILE is the file that was started, LR_DO what for, LR_ARGS its arguments as they were written.
set "LR_WINDOW="
set "LR_CODE_PAGE="
rem cmd searches the current folder for programs first: a py.exe there, next to a downloaded recipe, is not Python.
set "LR_SEARCH=%NoDefaultCurrentDirectoryInExePath%"
set "NoDefaultCurrentDirectoryInExePath=1"
for %%r in ("%~dp0..\..") do set "LR_ROOT=%%~fr"
set "LR_PROGRAM=%LR_ROOT%\.venv\Scripts\lora-rocm.exe"

rem The Explorer starts   cmd.exe /c ""C:\...\train.bat" "   and with something dropped   ""C:\...\train.bat" "C:\my pics""
rem where a path without spaces has no quotes, not even around &. So what was dropped is read from that line.
if defined LORA_ROCM_SCRIPTED goto python
if not defined CMDCMDLINE goto python
set "LR_LINE=%CMDCMDLINE:"=?%"
set "LR_LINE=%LR_LINE:*/c ??=%"
set "LR_DROP=%LR_LINE:*.bat? =%"
if /i not "%LR_LINE%"=="%LR_FILE%? %LR_DROP%" goto python
rem Options were not dropped: they follow a path, which may be quoted or not. A path may have " --" in it.
if "%LR_DROP:~0,1%"=="?" goto quoted
if not "%LR_DROP: --=%"=="%LR_DROP%" goto python
goto dropped
:quoted
if not "%LR_DROP:? --=%"=="%LR_DROP%" goto python
:dropped
set "LR_DROP=%LR_DROP:?=%"
if not defined LR_DROP goto window
if not "%LR_DROP:~1,2%"==":\" if not "%LR_DROP:~0,2%"=="\\" goto python
set LR_ARGS="%LR_DROP%"
:window
set "LR_WINDOW=1"

:python
rem Missing arguments are reported before anything is installed, which takes minutes and gigabytes.
if defined LR_ARGS goto asked
set "LR_CODE=2"
if "%LR_DO%"=="train" echo Drop a recipe or a folder of images onto train.bat, or name one: train.bat RECIPE 1>&2
if "%LR_DO%"=="train" goto leave
if "%LR_DO%"=="resume" echo Drop a recipe or a run onto resume.bat, or name one: resume.bat RECIPE 1>&2
if "%LR_DO%"=="resume" goto leave
if "%LR_DO%"=="sample" echo Name a run: sample.bat RUN --prompt TEXT 1>&2
if "%LR_DO%"=="sample" goto leave
:asked
for /f "tokens=2 delims=:." %%c in ('chcp') do set "LR_CODE_PAGE=%%c"
chcp 65001 >nul
if not defined PYTHONUTF8 set "PYTHONUTF8=1"
rem Each is tried for real: "py" may know no Python 3, and "python" may only open the Microsoft Store.
set LR_NEW_ENOUGH=-I -c "import sys; sys.exit(sys.version_info < (3, 11))"
set "LR_PYTHON=py -3"
%LR_PYTHON% %LR_NEW_ENOUGH% >nul 2>nul
if %ERRORLEVEL% equ 0 goto folder
set "LR_PYTHON=python"
%LR_PYTHON% %LR_NEW_ENOUGH% >nul 2>nul
if %ERRORLEVEL% equ 0 goto folder
echo Python 3.11 or newer was not found. Install it from https://www.python.org (64 bit) and run this again. 1>&2
set "LR_CODE=3"
goto leave

:folder
set "LR_AT_ROOT=%LR_WINDOW%"
if "%LR_DO%"=="demo" set "LR_AT_ROOT=1"
if "%LR_DO%"=="test" set "LR_AT_ROOT=1"
rem pushd, because cd cannot go to a network path.
if defined LR_AT_ROOT pushd "%LR_ROOT%"
set "LR_SETUP="
if "%LR_DO%"=="install" set LR_SETUP=%LR_ARGS%
if "%LR_DO%"=="test" set "LR_SETUP=--dev"
%LR_PYTHON% "%LR_ROOT%\scripts\install.py" %LR_SETUP%
set "LR_CODE=%ERRORLEVEL%"
if %LR_CODE% equ 0 goto %LR_DO%
goto back

:train
set "LR_ONE=%LR_ARGS:"=%"
if not defined LR_ONE goto recipe
if not exist "%LR_ONE%" goto recipe
for %%f in ("%LR_ONE%\.") do set "LR_NAME=%%~nxf"
if exist "%LR_ONE%\*" goto images
for %%f in ("%LR_ONE%") do set "LR_NAME=%%~nf"
for %%f in ("%LR_ONE%") do set "LR_ENDING=%%~xf"
for %%e in (.toml .json .sh .ps1 .bat .cmd .env .py .ipynb) do if /i "%LR_ENDING%"=="%%e" goto foreign
rem Another trainer's YAML is recognised by the program. Its answer is a file: in a pipe, cmd would read the path again.
if /i not "%LR_ENDING%"==".yaml" if /i not "%LR_ENDING%"==".yml" goto recipe
set "LR_THEN=recognise"
goto own
:recognise
"%LR_PROGRAM%" check "%LR_ONE%" --schema-only --json >"%TEMP%\%LR_OWN%\answer.json" 2>nul
"%SystemRoot%\System32\find.exe" "recipe-foreign" "%TEMP%\%LR_OWN%\answer.json" >nul 2>nul
set "LR_CODE=%ERRORLEVEL%"
rmdir /s /q "%TEMP%\%LR_OWN%" 2>nul
if not %LR_CODE% equ 0 goto recipe
:foreign
rem The recipe is not trained at once: its user has to read first which keys were lost.
set "LR_NEW=.\%LR_NAME%-lora-rocm.yaml"
"%LR_PROGRAM%" import "%LR_ONE%" --output "%LR_NEW%"
set "LR_CODE=%ERRORLEVEL%"
if %LR_CODE% equ 0 echo Drop "%LR_NEW%" onto train.bat to train it. 1>&2
goto back
:images
rem With .\ a name that begins with dashes is not an option. An existing recipe of that name is used as it is: it may have been edited.
if not defined LR_NAME set "LR_NAME=images"
set "LR_NEW=.\%LR_NAME%.yaml"
if exist "%LR_NEW%" goto made
"%LR_PROGRAM%" new "%LR_NEW%" --from sdxl --images "%LR_ONE%"
set "LR_CODE=%ERRORLEVEL%"
if not %LR_CODE% equ 0 goto back
:made
set LR_ARGS="%LR_NEW%"
:recipe
"%LR_PROGRAM%" train %LR_ARGS%
goto done

:resume
set "LR_ONE=%LR_ARGS:"=%"
if exist "%LR_ONE%\*" goto of_folder
"%LR_PROGRAM%" train --resume latest %LR_ARGS%
goto done
:of_folder
"%LR_PROGRAM%" resume "%LR_ONE%"
goto done

:doctor
:demo
:sample
:ui
"%LR_PROGRAM%" %LR_DO% %LR_ARGS%
goto done

:test
"%LR_ROOT%\.venv\Scripts\python.exe" -m pytest -n 2 %LR_ARGS%
goto done

:shell
set "LR_THEN=variables"
goto own
:variables
pushd "%TEMP%"
"%LR_PROGRAM%" env --shell cmd >%LR_OWN%\plan.bat
set "LR_CODE=%ERRORLEVEL%"
rem The one call: the variables that it sets stay. Of a path without odd letters, which it could not read wrongly.
if %LR_CODE% equ 0 call .\%LR_OWN%\plan.bat
rmdir /s /q %LR_OWN% 2>nul
popd
if not %LR_CODE% equ 0 goto back
set "VIRTUAL_ENV=%LR_ROOT%\.venv"
set "PATH=%LR_ROOT%\.venv\Scripts;%PATH%"
rem The prompt itself kept the window open. The @ keeps cmd from taking off the quotes around a program's path.
set "LR_WINDOW="
set "NoDefaultCurrentDirectoryInExePath=%LR_SEARCH%"
if defined LR_ARGS "%ComSpec%" /d /c @%LR_ARGS%
if not defined LR_ARGS "%ComSpec%" /k
goto done

:own
rem Makes LR_OWN, a folder in %TEMP% for this process alone, and goes on at LR_THEN. A name is not enough for that:
rem %RANDOM% is the same for all that start within one second. mkdir sets no error level of 0, ver does.
set "LR_OWN=lora-rocm-%RANDOM%%RANDOM%"
ver >nul
mkdir "%TEMP%\%LR_OWN%" 2>nul
if not errorlevel 1 goto %LR_THEN%
if exist "%TEMP%\%LR_OWN%" goto own
goto %LR_THEN%

:done
set "LR_CODE=%ERRORLEVEL%"
:install
:back
if defined LR_AT_ROOT popd
:leave
if defined LR_CODE_PAGE chcp %LR_CODE_PAGE% >nul
if not defined LR_WINDOW exit /b %LR_CODE%
pause
rem Not exit /b: of a dropped path with an & and no quotes, cmd would then run the rest as a command.
exit %LR_CODE%
